//! Memory pools of stream-ordered allocations. A pool keeps freed memory for later allocations.
//!
//! ```text
//! cuMemAllocAsync ──> in use ──cuMemFreeAsync, after the stream's work──> held by the pool
//!
//! held by the pool ──an allocation of the same size───────────────────────> in use
//!                  ──the application waits for work, and the pool has
//!                    reserved more than its threshold─────────────────────> freed
//! ```

use std::collections::BTreeMap;

use affinode_sim_protocol::{ObjectId, Request};

use crate::abi::{
    CUdevice, CUdeviceptr, Handle, INVALID_VALUE, Kind, OUT_OF_MEMORY, Outcome, handle, number,
};
use crate::client::Granted;
use crate::contexts::Current;
use crate::driver::Driver;
use crate::memory::{Origin, Source};
use crate::pages::PAGE_BYTES;

#[derive(Debug, Default)]
pub struct Pool {
    pub device: CUdevice,
    /// Settings that allow a stream to reuse memory that another stream has freed. The three cases
    /// are: an event orders both streams, the earlier work has completed, and the driver inserts a
    /// wait into the stream.
    pub reuse: [i32; 3],
    pub threshold: u64,
    pub used: Level,
    pub reserved: Level,
    is_default: bool,
    held: Vec<(ObjectId, u64)>,
}

/// A number of bytes that changes: its current value, and the highest value since the last reset.
#[derive(Debug, Default)]
pub struct Level {
    pub bytes: u64,
    pub high: u64,
}

impl Level {
    fn rise(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.high = self.high.max(self.bytes);
    }
}

#[derive(Debug, Clone, Copy)]
struct Allocation {
    pool: u64,
    asked: u64,
    bytes: u64,
    is_freed: bool,
}

#[derive(Debug, Default)]
pub struct Pools {
    pools: BTreeMap<u64, Pool>,
    default: BTreeMap<CUdevice, u64>,
    current: BTreeMap<CUdevice, u64>,
    allocations: BTreeMap<CUdeviceptr, Allocation>,
    made: u64,
}

impl Pools {
    pub fn create(&mut self, device: CUdevice) -> Handle {
        self.made += 1;
        self.pools.insert(self.made, Pool { device, reuse: [1; 3], ..Pool::default() });
        handle(Kind::Pool, self.made)
    }

    pub fn default_of(&mut self, device: CUdevice) -> Handle {
        if let Some(known) = self.default.get(&device) {
            return handle(Kind::Pool, *known);
        }
        let made = self.create(device);
        self.default.insert(device, self.made);
        if let Some(pool) = self.pools.get_mut(&self.made) {
            pool.is_default = true;
        }
        made
    }

    /// Returns the pool from which `cuMemAllocAsync` allocates on a device.
    pub fn current_of(&mut self, device: CUdevice) -> Handle {
        match self.current.get(&device).filter(|pool| self.pools.contains_key(pool)) {
            Some(current) => handle(Kind::Pool, *current),
            None => self.default_of(device),
        }
    }

    pub fn set_current(&mut self, device: CUdevice, pool: Handle) -> Outcome {
        if self.get(pool)?.device != device {
            return Err(INVALID_VALUE);
        }
        self.current.insert(device, number(Kind::Pool, pool)?);
        Ok(())
    }

    /// Returns the pool to which a handle refers.
    pub fn get(&mut self, pool: Handle) -> Outcome<&mut Pool> {
        self.pools.get_mut(&number(Kind::Pool, pool)?).ok_or(INVALID_VALUE)
    }

    /// Removes a pool that is to be destroyed. Allocations in use stay valid. Returns the unused
    /// objects, which must be freed.
    fn remove(&mut self, pool: Handle) -> Outcome<Vec<ObjectId>> {
        if self.get(pool)?.is_default {
            return Err(INVALID_VALUE);
        }
        let removed = self.pools.remove(&number(Kind::Pool, pool)?);
        Ok(removed.into_iter().flat_map(|pool| pool.held).map(|(object, _)| object).collect())
    }

    /// Returns the handle of the pool that an allocation belongs to. Returns 0 if it belongs to
    /// none.
    pub fn of(&self, address: CUdeviceptr) -> Handle {
        self.allocations.get(&address).map_or(0, |of| handle(Kind::Pool, of.pool))
    }

    /// Records that the application has freed an allocation.
    pub fn is_freed(&mut self, address: CUdeviceptr) {
        if let Some(of) = self.allocations.get_mut(&address)
            && !std::mem::replace(&mut of.is_freed, true)
            && let Some(pool) = self.pools.get_mut(&of.pool)
        {
            pool.used.bytes -= of.asked;
        }
    }

    /// Removes unused memory from a pool until at most `keep` bytes are reserved. Returns the
    /// objects that must be freed.
    fn surplus(&mut self, pool: u64, keep: u64) -> Vec<ObjectId> {
        let mut freed = Vec::new();
        if let Some(pool) = self.pools.get_mut(&pool) {
            while pool.reserved.bytes > keep
                && let Some((object, bytes)) = pool.held.pop()
            {
                pool.reserved.bytes -= bytes;
                freed.push(object);
            }
        }
        freed
    }
}

impl Driver {
    /// Allocates physical memory. If VRAM is short, pools release their unused memory.
    pub fn obtain(&self, gpu: usize, bytes: u64) -> Outcome<Granted> {
        let obtain = || self.link.obtain(&Request::Allocate { gpu, bytes }, None);
        match obtain() {
            Err(OUT_OF_MEMORY) => {
                self.trim_all(|_| 0)?;
                obtain()
            }
            other => other,
        }
    }

    fn release(&self, objects: Vec<ObjectId>) -> Outcome {
        objects.into_iter().try_for_each(|object| {
            let last = self.memory().drop_handle(object)?;
            if last { self.link.tell(&Request::Free { object }) } else { Ok(()) }
        })
    }

    fn trim_all(&self, keep: impl Fn(&Pool) -> u64) -> Outcome {
        let keeps: Vec<_> = self.pools().pools.iter().map(|(pool, of)| (*pool, keep(of))).collect();
        keeps.into_iter().try_for_each(|(pool, keep)| {
            let surplus = self.pools().surplus(pool, keep);
            self.release(surplus)
        })
    }

    /// Frees the unused memory that exceeds each pool's threshold. Called after the application has
    /// waited for queued work.
    pub fn trim_pools(&self) -> Outcome {
        self.trim_all(|pool| pool.threshold)
    }

    /// Simulates the function `cuMemPoolTrimTo`.
    pub fn trim_pool(&self, pool: Handle, keep: u64) -> Outcome {
        self.pools().get(pool)?;
        let surplus = self.pools().surplus(number(Kind::Pool, pool)?, keep);
        self.release(surplus)
    }

    /// Simulates the function `cuMemPoolDestroy`.
    pub fn destroy_pool(&self, pool: Handle) -> Outcome {
        let held = self.pools().remove(pool)?;
        self.release(held)
    }

    /// Allocates memory from a pool.
    pub fn pool_allocate(
        &self,
        pool: Handle,
        asked: usize,
        current: Current,
    ) -> Outcome<CUdeviceptr> {
        let bytes = asked.checked_next_multiple_of(PAGE_BYTES).ok_or(OUT_OF_MEMORY)? as u64;
        if asked == 0 {
            return Err(INVALID_VALUE);
        }
        let device = self.pools().get(pool)?.device;
        let held = {
            let mut pools = self.pools();
            let pool = pools.get(pool)?;
            let fits = pool.held.iter().position(|(_, size)| *size == bytes);
            fits.map(|place| pool.held.remove(place).0)
        };
        let object = match held {
            Some(object) => object,
            None => {
                let granted = self.obtain(self.gpu(device)?, bytes)?;
                self.memory().add(&granted, Source::Own)?;
                self.pools().get(pool)?.reserved.rise(bytes);
                granted.object
            }
        };
        let address = self.memory().place(object, asked, current.context, Origin::Pool)?;
        let mut pools = self.pools();
        pools.get(pool)?.used.rise(asked as u64);
        let pool = number(Kind::Pool, pool)?;
        let asked = asked as u64;
        pools.allocations.insert(address, Allocation { pool, asked, bytes, is_freed: false });
        Ok(address)
    }

    /// Returns the memory of an allocation to its pool, or frees it if the pool has been destroyed.
    /// Called when no work uses the allocation.
    pub fn pool_takes_back(&self, address: CUdeviceptr) -> Outcome {
        // The record of the allocation is removed first, because another allocation may get this
        // address as soon as the address is unmapped.
        let of = {
            let mut pools = self.pools();
            pools.is_freed(address);
            pools.allocations.remove(&address).ok_or(INVALID_VALUE)?
        };
        let object = {
            let mut memory = self.memory();
            let object = memory.describe(address).ok_or(INVALID_VALUE)?.object;
            memory.retain(object)?;
            memory.remove(address, Origin::Pool)?;
            object
        };
        let goes = match self.pools().pools.get_mut(&of.pool) {
            Some(pool) => {
                pool.held.push((object, of.bytes));
                None
            }
            None => Some(object),
        };
        self.release(goes.into_iter().collect())
    }
}
