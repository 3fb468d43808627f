//! The ledger of host memory: the promises to offloads in progress, on the node and in each memory
//! cgroup, as far as they are not touched yet.
//!
//! A reading shows what is free at one moment. Two containers judged by readings of the same
//! moment would both be promised the same memory, and the kernel would kill one. So an offload is
//! judged by a reading less the ledger's promises to others:
//!
//! ```text
//! survey asked ──reading──> free - promised to others ≥ need?
//!                             yes: promised ──> copied or checkpointed ──> released
//!                             short only because of promises: asked again soon
//!                             short without them: the container stays
//! ```
//!
//! A promise counts in full until its offload is over, also for memory that was touched meanwhile.
//! The readings of that time show a part of it twice, which delays others but endangers none. A
//! released promise still counts for readings that were requested before its release.

use super::{Key, Millis};

/// A promise counts for at most this long: about the time in which the driver checkpoints 140 GiB.
/// Otherwise a process that never reports would delay the offloads of others forever.
const MAX_PROMISE_MS: Millis = 180_000;

/// One pool of host memory that an offload draws on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPool {
    /// Path of the memory cgroup; `None` is the node.
    pub group: Option<String>,
    /// What may be taken from it, in bytes: the reserve is left out.
    pub free_bytes: u64,
    /// What this offload takes from it, in bytes.
    pub need_bytes: u64,
}

impl MemoryPool {
    /// The pool's name for messages: its path, or "the node".
    #[must_use]
    pub fn name(&self) -> &str {
        self.group.as_deref().unwrap_or("the node")
    }
}

/// Why an offload finds no host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryShortage {
    /// The pool has too little, whatever becomes of offloads in progress.
    Short {
        /// The pool with too little memory.
        pool: MemoryPool,
    },
    /// The pool would have enough without what it owes to offloads in progress.
    Promised {
        /// The pool whose memory is promised to others.
        pool: MemoryPool,
        /// What others were promised there, in bytes.
        promised_bytes: u64,
    },
}

#[derive(Clone, Debug)]
struct HostPromise {
    key: Key,
    pools: Vec<MemoryPool>,
    /// Taken over from the journal for processes that have not registered: they may be touching
    /// the memory.
    is_recalled: bool,
    /// Position in the order in which promises were made.
    number: u64,
    made_at: Millis,
    /// Its memory may be touched from now on.
    is_moving: bool,
    released_at: Option<Millis>,
    /// The pool that ran short while the memory was touched: the copy out is turned back.
    short_pool: Option<MemoryPool>,
}

/// The promises of host memory to offloads in progress.
#[derive(Clone, Debug, Default)]
pub struct HostLedger {
    /// In the order in which they were made. A container has at most one that is not released.
    promises: Vec<HostPromise>,
    last_number: u64,
}

impl HostLedger {
    /// Judges a reading that was requested at `asked_at`.
    ///
    /// A container that has a promise waits only for promises that are older than its own, or
    /// whose memory is being touched: two that wait for each other would wait for ever.
    ///
    /// # Errors
    /// The first pool that has too little.
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

    /// Promises the memory that an offload needs by a reading. An earlier promise to the same
    /// container keeps its place in the order.
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

    /// Takes over promises of an earlier controller to processes of this container that have not
    /// registered. Without pools the promise is released.
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

    /// Records that the container's memory is being moved from now on.
    pub fn begin_move(&mut self, key: &Key) {
        if let Some(promise) = self.standing_mut(key) {
            promise.is_moving = true;
        }
    }

    /// Records that a pool has less free memory than the container's copy out has still to touch.
    pub fn turn_back(&mut self, key: &Key, short_pool: MemoryPool) {
        if let Some(promise) = self.standing_mut(key) {
            promise.short_pool.get_or_insert(short_pool);
        }
    }

    /// The pool that ran short during the container's copy out, if one did.
    #[must_use]
    pub fn short_pool(&self, key: &Key) -> Option<&MemoryPool> {
        self.standing(key)?.short_pool.as_ref()
    }

    /// Releases the promises of containers that no longer move. Forgets released ones that no
    /// pending reading needs. `oldest_survey`: when the oldest pending reading was requested.
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

    /// What is promised of the node and not released, in bytes.
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
