//! The ledger of host memory. It records the memory that is promised to offloads in progress, for
//! the node and for each memory cgroup.
//!
//! A reading shows the free memory at one moment. If two offloads were judged only by readings of
//! the same moment, both would be promised the same memory, and the kernel would kill a process.
//! Therefore the memory promised to other offloads is subtracted from each reading:
//!
//! ```text
//! survey asked ──reading──> free - promised to others ≥ need?
//!                             yes: promised ──> copied or checkpointed ──> released
//!                             short only because of promises: asked again soon
//!                             short without them: the container stays
//! ```
//!
//! A promise counts in full until its offload has ended, even for memory that is already in use. A
//! reading during the offload does not show the memory in use as free, so this memory is subtracted
//! twice. That delays other offloads but does not endanger them. A released promise still counts
//! for readings that were requested before its release.

use super::{Key, Millis};

/// Time after which a promise no longer counts. It is about the duration of a driver checkpoint of
/// 140 GiB. Without the limit, a process that never reports would delay other offloads forever.
const MAX_PROMISE_MS: Millis = 180_000;

/// One pool of host memory from which an offload takes memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPool {
    /// Path of the memory cgroup. `None`: the node.
    pub group: Option<String>,
    /// Memory that may be taken from the pool, in bytes. The reserve is not included.
    pub free_bytes: u64,
    /// Memory that this offload takes from the pool, in bytes.
    pub need_bytes: u64,
}

impl MemoryPool {
    /// The pool's name for messages: its path, or "the node".
    #[must_use]
    pub fn name(&self) -> &str {
        self.group.as_deref().unwrap_or("the node")
    }
}

/// Reason for which host memory does not suffice for an offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryShortage {
    /// The pool has too little free memory, even without the promises to other offloads.
    Short {
        /// The pool with too little memory.
        pool: MemoryPool,
    },
    /// The pool would have enough free memory without the promises to other offloads.
    Promised {
        /// The pool whose memory is promised to others.
        pool: MemoryPool,
        /// Memory of the pool that is promised to others, in bytes.
        promised_bytes: u64,
    },
}

#[derive(Clone, Debug)]
struct HostPromise {
    key: Key,
    pools: Vec<MemoryPool>,
    /// Whether the promise was taken over from the journal of an earlier controller, for processes
    /// that have not registered. Their offloads may be using the memory already.
    is_recalled: bool,
    /// Position in the order in which promises were made.
    number: u64,
    made_at: Millis,
    /// Whether the move has begun, so that the memory may be in use.
    is_moving: bool,
    released_at: Option<Millis>,
    /// The memory pool that had too little free memory during the copy out. If it is set, the copy
    /// out is cancelled.
    short_pool: Option<MemoryPool>,
}

/// The promises of host memory to offloads in progress.
#[derive(Clone, Debug, Default)]
pub struct HostLedger {
    /// The promises in the order in which they were made. A container has at most one promise that
    /// is not released.
    promises: Vec<HostPromise>,
    last_number: u64,
}

impl HostLedger {
    /// Judges whether a reading that was requested at `asked_at` shows enough memory.
    ///
    /// A container that has a promise waits only for older promises, and for promises whose memory
    /// may be in use already. Otherwise two containers could wait for each other forever.
    ///
    /// # Errors
    /// The first pool that has too little memory, and whether promises to others are the cause.
    pub fn judge(
        &self,
        key: &Key,
        pools: &[MemoryPool],
        asked_at: Millis,
        now: Millis,
    ) -> Result<(), MemoryShortage> {
        for pool in pools {
            if pool.free_bytes < pool.need_bytes {
                return Err(MemoryShortage::Short { pool: pool.clone() });
            }
        }
        for pool in pools {
            let promised_bytes = self.promised_to_others(key, pool, asked_at, now);
            if pool.free_bytes.saturating_sub(promised_bytes) < pool.need_bytes {
                return Err(MemoryShortage::Promised { pool: pool.clone(), promised_bytes });
            }
        }
        Ok(())
    }

    fn promised_to_others(
        &self,
        key: &Key,
        pool: &MemoryPool,
        asked_at: Millis,
        now: Millis,
    ) -> u64 {
        let own_number = self.standing(key).map_or(u64::MAX, |own| own.number);
        self.promises
            .iter()
            .filter(|promise| {
                (promise.key != *key || promise.is_recalled)
                    && (promise.is_moving || promise.number < own_number)
                    && promise.released_at.is_none_or(|released| released >= asked_at)
                    && now.saturating_sub(promise.made_at) <= MAX_PROMISE_MS
            })
            .flat_map(|promise| &promise.pools)
            .filter(|promised| promised.group == pool.group)
            .fold(0, |sum, promised| sum.saturating_add(promised.need_bytes))
    }

    /// Records the promise of the memory that an offload needs. If the container has a promise
    /// already, the new one replaces it and keeps its place in the order.
    pub fn promise(&mut self, key: &Key, pools: Vec<MemoryPool>, now: Millis) {
        if let Some(promise) = self.standing_mut(key) {
            (promise.pools, promise.short_pool) = (pools, None);
            return;
        }
        self.last_number += 1;
        self.promises.push(HostPromise {
            key: key.clone(),
            pools,
            is_recalled: false,
            number: self.last_number,
            made_at: now,
            is_moving: false,
            released_at: None,
            short_pool: None,
        });
    }

    fn standing(&self, key: &Key) -> Option<&HostPromise> {
        self.promises.iter().find(|p| p.key == *key && !p.is_recalled && p.released_at.is_none())
    }

    fn standing_mut(&mut self, key: &Key) -> Option<&mut HostPromise> {
        let mut promises = self.promises.iter_mut();
        promises.find(|p| p.key == *key && !p.is_recalled && p.released_at.is_none())
    }

    /// Takes over the promises of an earlier controller to processes of this container that have
    /// not registered. If `pools` is empty, the promise is released.
    pub fn recall(&mut self, key: &Key, pools: Vec<MemoryPool>, now: Millis) {
        let known = self
            .promises
            .iter_mut()
            .find(|p| p.key == *key && p.is_recalled && p.released_at.is_none());
        match known {
            Some(promise) if pools.is_empty() => promise.released_at = Some(now),
            Some(promise) => promise.pools = pools,
            None if pools.is_empty() => {}
            None => self.promises.push(HostPromise {
                key: key.clone(),
                pools,
                is_recalled: true,
                number: 0,
                made_at: now,
                is_moving: true,
                released_at: None,
                short_pool: None,
            }),
        }
    }

    /// Records that the move of the container's memory has begun.
    pub fn begin_move(&mut self, key: &Key) {
        if let Some(promise) = self.standing_mut(key) {
            promise.is_moving = true;
        }
    }

    /// Records a pool that has less free memory than the container's copy out still needs.
    pub fn turn_back(&mut self, key: &Key, short_pool: MemoryPool) {
        if let Some(promise) = self.standing_mut(key) {
            promise.short_pool.get_or_insert(short_pool);
        }
    }

    /// The pool that had too little free memory during the container's copy out, if there is one.
    #[must_use]
    pub fn short_pool(&self, key: &Key) -> Option<&MemoryPool> {
        self.standing(key)?.short_pool.as_ref()
    }

    /// Releases the promises of containers whose offload has ended. Removes released promises that
    /// no pending reading needs. `oldest_survey`: when the oldest pending reading was requested.
    pub fn settle(
        &mut self,
        now: Millis,
        oldest_survey: Option<Millis>,
        is_leaving: impl Fn(&Key) -> bool,
    ) {
        for promise in &mut self.promises {
            let ends = !promise.is_recalled && !is_leaving(&promise.key);
            if promise.released_at.is_none() && ends {
                promise.released_at = Some(now);
            }
        }
        let is_needed = |released: Millis| oldest_survey.is_some_and(|asked| asked <= released);
        self.promises.retain(|promise| promise.released_at.is_none_or(is_needed));
    }

    /// Whether no promise is recorded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.promises.is_empty()
    }

    /// Host memory of the node that is promised and not released, in bytes.
    #[must_use]
    pub fn promised_node_bytes(&self) -> u64 {
        self.promises
            .iter()
            .filter(|promise| promise.released_at.is_none())
            .flat_map(|promise| &promise.pools)
            .filter(|pool| pool.group.is_none())
            .fold(0, |sum, pool| sum.saturating_add(pool.need_bytes))
    }
}

#[cfg(test)]
mod tests;
