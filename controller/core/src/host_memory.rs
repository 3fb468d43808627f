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
//! A promise counts in full until its offload has ended, even for memory that the offload already
//! uses. Such memory is counted twice, because readings do not show it as free either. The double
//! count delays other offloads but does not endanger them. A released promise still counts for
//! readings that were requested before its release: such a reading may show memory as free that the
//! offload has taken since.

use affinode_proto::wire::copier::CHUNK_BYTES;

use super::{Key, Millis};

/// Maximum age of a promise of host memory. An older promise is ignored, because a process that
/// never reports would otherwise delay other offloads forever. A driver checkpoint of 140 GiB takes
/// about this long.
const MAX_PROMISE_MS: Millis = 180_000;

/// Which host memory a [`MemoryPool`] is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPlace {
    /// All memory of the node.
    Node,
    /// A memory cgroup with a limit, by its path.
    Cgroup(String),
    /// The node's host pool, whose memory is charged to Affinode's cgroup.
    HostPool,
}

/// A pool of host memory from which an offload takes memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPool {
    /// Which host memory the pool is.
    pub place: MemoryPlace,
    /// Memory that may be taken from the pool, in bytes. The reserve that must stay free is
    /// subtracted already.
    pub free_bytes: u64,
    /// Memory that the offload needs from the pool, in bytes.
    pub need_bytes: u64,
}

impl MemoryPool {
    /// The pool's name for messages, for example the path of its cgroup.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.place {
            MemoryPlace::Node => "the node",
            MemoryPlace::Cgroup(path) => path,
            MemoryPlace::HostPool => "the host pool",
        }
    }
}

/// Host memory that the offload of one process needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNeed {
    /// Host pid of the process.
    pub pid: u32,
    /// VRAM of the process in bytes, as the core knew it when it determined the need.
    pub vram_bytes: u64,
    /// Memory that the offload moves to host memory of the container if the host pool is not used,
    /// in bytes. 0: unknown.
    pub bytes: u64,
    /// Memory that the library copies if the host pool is used, in bytes, as the process reports it.
    /// The survey limits it to the VRAM that NVML reports for the process.
    pub copied_bytes: u64,
    /// Memory of the host pool that the process has already and uses again for the copy, in bytes,
    /// as the process reports it. The host pool permits less if it finds less.
    pub kept_bytes: u64,
    /// Whether the driver's checkpoint moves a part of the memory. That part is always moved to
    /// memory of the container.
    pub driver_moves: bool,
}

impl HostNeed {
    /// Memory of the container that the offload needs if the host pool is not used, in bytes.
    /// `overhead_bytes`: memory that the driver needs in addition to the VRAM.
    #[must_use]
    pub fn own_bytes(&self, overhead_bytes: u64) -> u64 {
        self.bytes.saturating_add(overhead_bytes)
    }

    /// Memory of the host pool that the offload needs, in bytes. A chunk is added, because the
    /// library requests memory in whole chunks.
    #[must_use]
    pub fn pooled_bytes(&self) -> u64 {
        match self.copied_bytes {
            0 => 0,
            bytes => bytes.saturating_add(CHUNK_BYTES),
        }
    }

    /// The part of the needed memory of the host pool that the process has already, in bytes.
    #[must_use]
    pub fn pooled_already_bytes(&self) -> u64 {
        self.kept_bytes.min(self.pooled_bytes())
    }

    /// Memory of the container that the offload needs if the content goes to the host pool, in bytes.
    /// This is memory for page tables and for the driver. The page tables of the process's memory
    /// file take at most a 512th of the file. The driver's records of registered memory take about
    /// as much. VRAM that the driver moves, and not the library, needs the container's memory in
    /// full.
    #[must_use]
    pub fn own_bytes_beside_host_pool(&self, overhead_bytes: u64) -> u64 {
        const MIN_BYTES: u64 = 32 << 20;
        let tables_bytes = match self.copied_bytes {
            0 => 0,
            bytes => bytes / 128 + MIN_BYTES,
        };
        let driver_bytes = match self.driver_moves {
            true => self.bytes.saturating_sub(self.copied_bytes).saturating_add(overhead_bytes),
            false => 0,
        };
        tables_bytes.saturating_add(driver_bytes)
    }
}

/// Returns the default of the memory that must stay free on a node with `total_bytes` of memory, in
/// bytes: a sixteenth, but at least 1 GiB. It grows with the memory, because a larger node runs more
/// processes that can allocate memory during a copy.
#[must_use]
pub fn node_reserve_bytes(total_bytes: u64) -> u64 {
    (total_bytes / 16).max(1 << 30)
}

/// The pools of host memory for one offload, for each place to which its content can be copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SurveyedMemory {
    /// The pools if the content is copied to the container's own memory.
    pub container: Vec<MemoryPool>,
    /// The pools if the content is copied to the host pool. Empty: it cannot be used.
    pub host_pool: Vec<MemoryPool>,
    /// The part of the host pool's memory for each process.
    pub allowances: Vec<HostPoolAllowance>,
}

/// Memory of the host pool for one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolAllowance {
    /// The process's pid on the host.
    pub pid: u32,
    /// Memory that the process may use, in bytes.
    pub bytes: u64,
    /// The part of this memory that the process has already, in bytes.
    pub kept_bytes: u64,
}

/// How much memory of the host pool a process may use for its offload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostPoolPermission {
    /// Permitted memory in bytes. 0: none.
    pub bytes: u64,
    /// The part of the permitted memory that the process has already, in bytes.
    pub kept_bytes: u64,
    /// Whether the last copy out of the process was to the file of its present connection to the host
    /// pool.
    pub was_used: bool,
}

/// State of the prefault of the host pool's memory for the next offload of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPoolPrefault {
    /// There is none. The next one may begin at this time.
    Off {
        /// Earliest time of the next one, in milliseconds.
        not_before: Millis,
    },
    /// The free host memory is being read.
    Surveyed,
    /// The processes were ordered to prefault, and may be allocating memory.
    Filling {
        /// Time of the order in milliseconds.
        since: Millis,
    },
    /// The processes have the memory.
    Ready {
        /// Time of the order in milliseconds.
        since: Millis,
        /// Time in milliseconds at which the processes had registered the memory.
        at: Millis,
    },
}

impl HostPoolPrefault {
    /// Time from which on NVML's readings may show the registration of the memory as work of the
    /// process. `None`: there is no prefault.
    #[must_use]
    pub fn registers_since(self) -> Option<Millis> {
        match self {
            HostPoolPrefault::Off { .. } | HostPoolPrefault::Surveyed => None,
            HostPoolPrefault::Filling { since } | HostPoolPrefault::Ready { since, .. } => {
                Some(since)
            }
        }
    }

    /// Time at which the processes had registered the memory. `None`: they have not.
    #[must_use]
    pub fn ready_at(self) -> Option<Millis> {
        match self {
            HostPoolPrefault::Ready { at, .. } => Some(at),
            _ => None,
        }
    }
}

impl Default for HostPoolPrefault {
    fn default() -> HostPoolPrefault {
        HostPoolPrefault::Off { not_before: 0 }
    }
}

/// Why host memory does not suffice for an offload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryShortage {
    /// The pool has too little free memory, even without the promises to other offloads.
    Short {
        /// The pool with too little memory.
        pool: MemoryPool,
    },
    /// The pool has enough free memory, but too much of it is promised to other offloads.
    Promised {
        /// The pool in which too little memory is left after the promises are subtracted.
        pool: MemoryPool,
        /// Memory of the pool that is promised to other offloads, in bytes.
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
    /// Number of the promise. Earlier promises have smaller numbers.
    number: u64,
    made_at: Millis,
    /// Whether the container's memory is being moved, so that the promised memory may be in use.
    is_moving: bool,
    released_at: Option<Millis>,
    /// The memory pool that had too little free memory during the copy out, so that the copy out is
    /// cancelled. `None`: every pool had enough.
    short_pool: Option<MemoryPool>,
}

/// The ledger of host memory: the promises to offloads in progress.
#[derive(Clone, Debug, Default)]
pub struct HostLedger {
    /// The promises in the order in which they were made. A container has at most one promise in
    /// effect, in addition to promises taken over from an earlier controller's journal.
    promises: Vec<HostPromise>,
    last_number: u64,
}

impl HostLedger {
    /// Decides whether a reading that was requested at `asked_at` shows enough free memory for an
    /// offload.
    ///
    /// Promises to other containers are subtracted from the free memory. If this container has a
    /// promise already, only older promises and promises whose memory may be in use are subtracted.
    /// Otherwise two containers could wait for each other forever.
    ///
    /// Memory of the host pool that is promised to this container already is not judged again. While
    /// its processes allocate this memory, readings show it as used by others. Only offloads with
    /// promises take memory of the host pool, so the promise remains true.
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
        let is_judged = |pool: &&MemoryPool| !self.has_host_pool_promise(key, pool, now);
        for pool in pools.iter().filter(is_judged) {
            if pool.free_bytes < pool.need_bytes {
                return Err(MemoryShortage::Short { pool: pool.clone() });
            }
        }
        for pool in pools.iter().filter(is_judged) {
            let promised_bytes = self.promised_to_others(key, pool, asked_at, now);
            if pool.free_bytes.saturating_sub(promised_bytes) < pool.need_bytes {
                return Err(MemoryShortage::Promised { pool: pool.clone(), promised_bytes });
            }
        }
        Ok(())
    }

    /// Whether the container has a promise of at least this memory of the host pool.
    fn has_host_pool_promise(&self, key: &Key, pool: &MemoryPool, now: Millis) -> bool {
        let suffices = |own: &MemoryPool| {
            own.place == MemoryPlace::HostPool && own.need_bytes >= pool.need_bytes
        };
        pool.place == MemoryPlace::HostPool
            && self.standing(key).is_some_and(|promise| {
                now.saturating_sub(promise.made_at) <= MAX_PROMISE_MS
                    && promise.pools.iter().any(suffices)
            })
    }

    /// Memory that the offload of a container lacks in this pool, in bytes, after the promises to
    /// others are subtracted.
    #[must_use]
    pub fn missing_bytes(
        &self,
        key: &Key,
        pool: &MemoryPool,
        asked_at: Millis,
        now: Millis,
    ) -> u64 {
        let promised_bytes = self.promised_to_others(key, pool, asked_at, now);
        pool.need_bytes.saturating_sub(pool.free_bytes.saturating_sub(promised_bytes))
    }

    /// Memory of the host pool that is promised to a container, in bytes.
    #[must_use]
    pub fn promised_host_pool_bytes(&self, key: &Key) -> u64 {
        let pools = self.standing(key).into_iter().flat_map(|promise| &promise.pools);
        let of_host_pool = pools.filter(|pool| pool.place == MemoryPlace::HostPool);
        of_host_pool.map(|pool| pool.need_bytes).sum()
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
            .filter(|promised| promised.place == pool.place)
            .fold(0, |sum, promised| sum.saturating_add(promised.need_bytes))
    }

    /// Records a promise of the memory that an offload needs. If the container has a promise
    /// already, the new amounts replace the old ones, and its place in the order is kept.
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

    /// Records the promises that an earlier controller made to processes of this container that
    /// have not registered. If `pools` is empty, releases the recorded promise.
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

    /// Records that the container's memory is being moved, so that the promised memory may be in
    /// use.
    pub fn begin_move(&mut self, key: &Key) {
        if let Some(promise) = self.standing_mut(key) {
            promise.is_moving = true;
        }
    }

    /// Records a pool with less free memory than the container's copy out still needs. The copy out
    /// is then cancelled.
    pub fn turn_back(&mut self, key: &Key, short_pool: MemoryPool) {
        if let Some(promise) = self.standing_mut(key) {
            promise.short_pool.get_or_insert(short_pool);
        }
    }

    /// The pool that had too little free memory during the container's copy out. `None`: every pool
    /// had enough.
    #[must_use]
    pub fn short_pool(&self, key: &Key) -> Option<&MemoryPool> {
        self.standing(key)?.short_pool.as_ref()
    }

    /// Whether the memory that is promised to the container's offload is that of the host pool.
    #[must_use]
    pub fn uses_host_pool(&self, key: &Key) -> bool {
        let in_pool = |promise: &HostPromise| {
            promise.pools.iter().any(|pool| pool.place == MemoryPlace::HostPool)
        };
        self.standing(key).is_some_and(in_pool)
    }

    /// Releases the promises of containers for which `is_leaving` is false, because their offload
    /// has ended. Then removes released promises, except those that a pending reading still needs.
    /// `oldest_survey`: returns when the oldest pending reading was requested. It is called only if a
    /// promise is released.
    pub fn settle(
        &mut self,
        now: Millis,
        oldest_survey: impl Fn() -> Option<Millis>,
        is_leaving: impl Fn(&Key) -> bool,
    ) {
        for promise in &mut self.promises {
            let ends = !promise.is_recalled && !is_leaving(&promise.key);
            if promise.released_at.is_none() && ends {
                promise.released_at = Some(now);
            }
        }
        if self.promises.iter().all(|promise| promise.released_at.is_none()) {
            return;
        }
        let oldest_survey = oldest_survey();
        let is_needed = |released: Millis| oldest_survey.is_some_and(|asked| asked <= released);
        self.promises.retain(|promise| promise.released_at.is_none_or(is_needed));
    }

    /// Whether the ledger contains no promise.
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
            .filter(|pool| pool.place == MemoryPlace::Node)
            .fold(0, |sum, pool| sum.saturating_add(pool.need_bytes))
    }
}

#[cfg(test)]
mod tests;
