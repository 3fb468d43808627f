//! Device memory of this process: physical objects and their mappings.
//!
//! ```text
//!  address ──> Mapping ──> Physical ──> window onto the daemon's memory file   (Running, Locked)
//!                                  └──> copy in host memory, no window         (Checkpointed)
//! ```
//! `cuMemAlloc` makes a reservation, a physical object and a mapping in one call. With the VMM
//! calls, a program makes each of the three by a separate call. A checkpoint and restore do not
//! change addresses.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use affinode_sim_protocol::ObjectId;

use crate::abi::{
    ACCESS_READ_WRITE, AllocationProp, CUdeviceptr, CUresult, HostAddress, ILLEGAL_ADDRESS,
    INVALID_VALUE, NOT_SUPPORTED, Outcome,
};
use crate::chunks::{Piece, host_piece};
use crate::client::Granted;
use crate::host::HostMemory;
use crate::pages::{PAGE_BYTES, Pages};

pub const GRANULARITY: usize = 2 << 20;

#[derive(Debug)]
struct Physical {
    gpu: usize,
    bytes: usize,
    window: Option<Arc<Pages>>,
    saved: Option<Pages>,
    handles: u32,
    mappings: u32,
    source: Source,
    /// Properties with which `cuMemCreate` created the object.
    property: Option<AllocationProp>,
}

/// Owner of a physical memory object, and how this process got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Own,
    /// The object belongs to another process and was imported by `cuMemImportFromShareableHandle`.
    Shared,
    /// The object belongs to another process and was opened by `cuIpcOpenMemHandle`.
    LegacyIpc,
}

/// Call that created a mapping. It determines which call removes the mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `cuMemAlloc` and its variants.
    Alloc,
    /// `cuMemAllocAsync` and its variants.
    Pool,
    /// `cuMemMap`, for an object of the VMM calls.
    Vmm,
    /// `cuIpcOpenMemHandle`, for memory of another process.
    Ipc,
}

#[derive(Debug)]
struct Mapping {
    bytes: usize,
    object: ObjectId,
    offset: usize,
    origin: Origin,
    context: u64,
    access: u32,
    /// Whether the mapping was freed in a stream that has not executed the free yet.
    freed: bool,
    /// Number of times that this mapping of another process's memory was opened.
    times: u32,
    /// The address range, if the mapping owns it. `None` if `cuMemAddressReserve` has reserved the
    /// range.
    _pages: Option<Pages>,
}

#[derive(Debug, Default)]
pub struct Memory {
    physical: BTreeMap<ObjectId, Physical>,
    mappings: BTreeMap<u64, Mapping>,
    reservations: BTreeMap<u64, Pages>,
    /// Blocks of host memory that the driver knows.
    pub host: HostMemory,
    /// Host memory that the driver allocates for a checkpoint, in addition to the contents of VRAM.
    extra: Option<Pages>,
}

/// Properties of a device address, as the pointer attributes return them.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    pub base: u64,
    pub bytes: u64,
    pub gpu: usize,
    pub context: u64,
    pub object: ObjectId,
    pub origin: Origin,
}

impl Memory {
    /// Adds a physical object with one handle. If the object already exists, adds one more handle
    /// to it.
    pub fn add(&mut self, granted: &Granted, source: Source) -> Outcome {
        if let Some(known) = self.physical.get_mut(&granted.object) {
            known.handles += 1;
            return Ok(());
        }
        let bytes = usize::try_from(granted.bytes).map_err(|_| INVALID_VALUE)?;
        let window = Some(Arc::new(Pages::window(granted.memory.as_fd(), bytes)?));
        let physical = Physical {
            gpu: granted.gpu,
            bytes,
            window,
            saved: None,
            handles: 1,
            mappings: 0,
            source,
            property: None,
        };
        self.physical.insert(granted.object, physical);
        Ok(())
    }

    /// Sets the properties of an object that was just created.
    pub fn made_as(&mut self, object: ObjectId, property: AllocationProp) {
        if let Some(physical) = self.physical.get_mut(&object) {
            physical.property.get_or_insert(property);
        }
    }

    /// Returns the properties with which an object was created. The object must have a handle.
    pub fn property(&self, object: ObjectId) -> Outcome<AllocationProp> {
        let physical = self.physical.get(&object).filter(|physical| physical.handles > 0);
        physical.and_then(|physical| physical.property).ok_or(INVALID_VALUE)
    }

    /// Returns the handle types with which an object can be exported, as a bit set.
    pub fn handle_types(&self, object: ObjectId) -> u32 {
        let property = self.physical.get(&object).and_then(|physical| physical.property);
        property.map_or(0, |property| property.requested_handle_types)
    }

    /// Whether other devices on the PCIe bus can access an object directly (GPUDirect RDMA). They
    /// cannot access memory of `cuMemAlloc`.
    pub fn is_reached_by_others(&self, object: ObjectId) -> bool {
        let property = self.physical.get(&object).and_then(|physical| physical.property);
        property.is_some_and(|property| property.flags[1] != 0)
    }

    /// Whether this process has created the physical object.
    pub fn owns(&self, object: ObjectId) -> bool {
        self.physical.get(&object).is_some_and(|physical| physical.source == Source::Own)
    }

    /// Drops one handle of an object. Returns true if the object must then be freed.
    pub fn drop_handle(&mut self, object: ObjectId) -> Outcome<bool> {
        let physical = self
            .physical
            .get_mut(&object)
            .filter(|physical| physical.handles > 0)
            .ok_or(INVALID_VALUE)?;
        physical.handles -= 1;
        Ok(self.bury(object))
    }

    /// Adds one handle to an object. Fails if the object does not exist.
    pub fn retain(&mut self, object: ObjectId) -> Outcome {
        self.physical.get_mut(&object).ok_or(INVALID_VALUE)?.handles += 1;
        Ok(())
    }

    fn bury(&mut self, object: ObjectId) -> bool {
        let dead = self
            .physical
            .get(&object)
            .is_some_and(|physical| physical.handles == 0 && physical.mappings == 0);
        if dead {
            self.physical.remove(&object);
        }
        dead
    }

    /// Maps an object at a new address. The mapping replaces one handle of the object.
    pub fn place(
        &mut self,
        object: ObjectId,
        bytes: usize,
        context: u64,
        origin: Origin,
    ) -> Outcome<CUdeviceptr> {
        let align = if bytes >= GRANULARITY { GRANULARITY } else { PAGE_BYTES };
        let pages = Pages::reserve(bytes, align)?;
        let address = pages.start() as u64;
        let physical = self.physical.get_mut(&object).ok_or(INVALID_VALUE)?;
        physical.handles -= 1;
        physical.mappings += 1;
        let access = ACCESS_READ_WRITE;
        let mapping = Mapping {
            bytes,
            object,
            offset: 0,
            origin,
            context,
            access,
            freed: false,
            times: 1,
            _pages: Some(pages),
        };
        self.mappings.insert(address, mapping);
        Ok(address)
    }

    /// Removes the mapping that starts at this address. Returns the object if it must be freed.
    pub fn remove(&mut self, address: CUdeviceptr, origin: Origin) -> Outcome<Option<ObjectId>> {
        self.mappings
            .get(&address)
            .filter(|mapping| mapping.origin == origin)
            .ok_or(INVALID_VALUE)?;
        Ok(self.unmap_at(address))
    }

    /// Records that the application has freed an allocation in a stream. The allocation is invalid
    /// from then on.
    pub fn free_later(&mut self, address: CUdeviceptr) -> Outcome<Origin> {
        let has = |mapping: &&mut Mapping| {
            matches!(mapping.origin, Origin::Alloc | Origin::Pool) && !mapping.freed
        };
        let mapping = self.mappings.get_mut(&address).filter(has).ok_or(INVALID_VALUE)?;
        mapping.freed = true;
        Ok(mapping.origin)
    }

    /// Counts one more opening of another process's object, if this context has already opened the
    /// object. Returns the object's address, or `None` if the context has not opened it.
    pub fn opened_again(&mut self, object: ObjectId, context: u64) -> Option<CUdeviceptr> {
        let same = |mapping: &Mapping| {
            (mapping.object, mapping.context, mapping.origin) == (object, context, Origin::Ipc)
        };
        let (address, mapping) = self.mappings.iter_mut().find(|(_, mapping)| same(mapping))?;
        mapping.times += 1;
        Some(*address)
    }

    /// Closes another process's memory, which this process may have opened several times. Only the
    /// last close removes the mapping. Returns the object if it must then be freed.
    pub fn close(&mut self, address: CUdeviceptr) -> Outcome<Option<ObjectId>> {
        let opened = self.mappings.get_mut(&address).filter(|m| m.origin == Origin::Ipc);
        let opened = opened.ok_or(INVALID_VALUE)?;
        opened.times -= 1;
        if opened.times > 0 {
            return Ok(None);
        }
        Ok(self.unmap_at(address))
    }

    fn unmap_at(&mut self, address: u64) -> Option<ObjectId> {
        let mapping = self.mappings.remove(&address)?;
        let physical = self.physical.get_mut(&mapping.object)?;
        physical.mappings -= 1;
        self.bury(mapping.object).then_some(mapping.object)
    }

    /// Detaches the allocations of pools from a context that ends, because they outlive it (as
    /// measured with driver 580). If the application has already freed some of these allocations,
    /// returns their addresses.
    pub fn outlive(&mut self, context: u64) -> Vec<u64> {
        let mut freed = Vec::new();
        for (address, mapping) in &mut self.mappings {
            if (mapping.context, mapping.origin) == (context, Origin::Pool) {
                mapping.context = 0;
                freed.extend(mapping.freed.then_some(*address));
            }
        }
        freed
    }

    /// Removes all mappings that a context owned. Returns the objects that must be freed.
    pub fn remove_context(&mut self, context: u64) -> Vec<ObjectId> {
        let owned = |mapping: &Mapping| mapping.context == context && mapping.origin != Origin::Vmm;
        let addresses: Vec<_> =
            self.mappings.iter().filter(|(_, m)| owned(m)).map(|(address, _)| *address).collect();
        addresses.into_iter().filter_map(|address| self.unmap_at(address)).collect()
    }

    /// Simulates the function `cuMemAddressReserve`.
    pub fn reserve(&mut self, bytes: usize, align: usize) -> Outcome<CUdeviceptr> {
        let aligned = align == 0 || align.is_power_of_two();
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !aligned {
            return Err(INVALID_VALUE);
        }
        let pages = Pages::reserve(bytes, align.max(GRANULARITY))?;
        let address = pages.start() as u64;
        self.reservations.insert(address, pages);
        Ok(address)
    }

    /// Simulates the function `cuMemAddressFree`.
    pub fn unreserve(&mut self, address: CUdeviceptr, bytes: usize) -> Outcome {
        let fits = self.reservations.get(&address).is_some_and(|pages| pages.bytes() == bytes);
        let in_use =
            self.mappings.range(address..address.saturating_add(bytes as u64)).next().is_some();
        if !fits || in_use {
            return Err(INVALID_VALUE);
        }
        self.reservations.remove(&address);
        Ok(())
    }

    /// Simulates the function `cuMemMap`.
    pub fn map(
        &mut self,
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        object: ObjectId,
    ) -> Outcome {
        let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        let (start, pages) =
            self.reservations.range(..=address).next_back().ok_or(INVALID_VALUE)?;
        let reserved = end <= start + pages.bytes() as u64;
        let overlaps = self
            .mappings
            .range(..end)
            .next_back()
            .is_some_and(|(base, m)| base + m.bytes as u64 > address);
        let physical = self.physical.get_mut(&object).ok_or(INVALID_VALUE)?;
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= physical.bytes);
        let aligned = address.is_multiple_of(GRANULARITY as u64)
            && bytes.is_multiple_of(GRANULARITY)
            && offset.is_multiple_of(GRANULARITY);
        if bytes == 0 || !reserved || overlaps || !inside || !aligned {
            return Err(INVALID_VALUE);
        }
        physical.mappings += 1;
        let mapping = Mapping {
            bytes,
            object,
            offset,
            origin: Origin::Vmm,
            context: 0,
            access: 0,
            freed: false,
            times: 1,
            _pages: None,
        };
        self.mappings.insert(address, mapping);
        Ok(())
    }

    /// Simulates `cuMemUnmap`, for whole mappings only. Returns the objects that must be freed.
    pub fn unmap(&mut self, address: CUdeviceptr, bytes: usize) -> Outcome<Vec<ObjectId>> {
        let addresses = self.vmm_range(address, bytes)?;
        Ok(addresses.into_iter().filter_map(|address| self.unmap_at(address)).collect())
    }

    /// Simulates the function `cuMemSetAccess`.
    pub fn set_access(&mut self, address: CUdeviceptr, bytes: usize, access: u32) -> Outcome {
        for address in self.vmm_range(address, bytes)? {
            if let Some(mapping) = self.mappings.get_mut(&address) {
                mapping.access = access;
            }
        }
        Ok(())
    }

    /// Simulates the function `cuMemGetAccess`.
    pub fn access(&self, address: CUdeviceptr) -> Outcome<(usize, u32)> {
        let (_, mapping) = self.mapping_at(address).ok_or(INVALID_VALUE)?;
        Ok((self.physical.get(&mapping.object).ok_or(INVALID_VALUE)?.gpu, mapping.access))
    }

    /// Returns the addresses of the VMM mappings that together cover exactly this range.
    fn vmm_range(&self, address: CUdeviceptr, bytes: usize) -> Outcome<Vec<u64>> {
        let end = address.checked_add(bytes as u64).ok_or(INVALID_VALUE)?;
        let mut next = address;
        let mut found = Vec::new();
        for (base, mapping) in self.mappings.range(address..end) {
            if *base != next || mapping.origin != Origin::Vmm {
                return Err(INVALID_VALUE);
            }
            found.push(*base);
            next = base + mapping.bytes as u64;
        }
        if next == end && !found.is_empty() { Ok(found) } else { Err(INVALID_VALUE) }
    }

    fn mapping_at(&self, address: CUdeviceptr) -> Option<(u64, &Mapping)> {
        let (base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.bytes as u64).then_some((*base, mapping))
    }

    /// Describes the mapping at a device address.
    pub fn describe(&self, address: CUdeviceptr) -> Option<Description> {
        let (base, mapping) = self.mapping_at(address)?;
        let gpu = self.physical.get(&mapping.object)?.gpu;
        let (bytes, context) = (mapping.bytes as u64, mapping.context);
        Some(Description {
            base,
            bytes,
            gpu,
            context,
            object: mapping.object,
            origin: mapping.origin,
        })
    }

    /// Returns the memory behind a range of device addresses. The range may cover several mappings.
    pub fn device(&self, address: CUdeviceptr, bytes: usize) -> Outcome<Vec<Piece>> {
        let mut pieces = Vec::new();
        let (mut next, mut left) = (address, bytes);
        while left > 0 {
            let (base, mapping) = self.mapping_at(next).ok_or(ILLEGAL_ADDRESS)?;
            let window =
                self.physical.get(&mapping.object).and_then(|physical| physical.window.clone());
            let window =
                window.filter(|_| mapping.access == ACCESS_READ_WRITE).ok_or(ILLEGAL_ADDRESS)?;
            let skip = (next - base) as usize;
            let length = left.min(mapping.bytes - skip);
            pieces.push(Piece::of(window, mapping.offset + skip, length));
            next += length as u64;
            left -= length;
        }
        Ok(pieces)
    }

    /// Returns the memory behind a range of addresses. Unlike [`Memory::device`], it returns host
    /// memory if the address is not a device address.
    pub fn any(&self, address: u64, bytes: usize) -> Outcome<Vec<Piece>> {
        if self.mapping_at(address).is_some() {
            return self.device(address, bytes);
        }
        host_piece(address as HostAddress, bytes)
    }

    /// Copies the contents of VRAM to host memory and removes them from the GPU. Returns 0 if the
    /// process can be restored. Returns the error code of every later restore if the process has
    /// memory of other processes.
    pub fn save(&mut self, extra_bytes: usize) -> Outcome<CUresult> {
        if self.host.has_managed() {
            return Err(NOT_SUPPORTED);
        }
        let extra = Pages::host(extra_bytes)?;
        extra.touch();
        self.extra = Some(extra);
        for physical in self.physical.values_mut() {
            if let Some(window) = &physical.window {
                let copy = Pages::host(physical.bytes)?;
                copy.copy_from(window);
                physical.saved = Some(copy);
            }
        }
        for physical in self.physical.values_mut() {
            physical.window = None;
        }
        let of = |source| self.physical.values().any(|physical| physical.source == source);
        // The driver cannot restore a process that has memory of another process. The error depends
        // on how the process got that memory.
        Ok(match (of(Source::LegacyIpc), of(Source::Shared)) {
            (true, _) => INVALID_VALUE,
            (_, true) => NOT_SUPPORTED,
            _ => 0,
        })
    }

    /// Writes the saved contents of an object into the new memory that the object got at a restore.
    pub fn refill(&mut self, object: ObjectId, memory: &OwnedFd) -> Outcome {
        let physical = self.physical.get_mut(&object).ok_or(INVALID_VALUE)?;
        let window = Pages::window(memory.as_fd(), physical.bytes)?;
        if let Some(saved) = physical.saved.take() {
            window.copy_from(&saved);
        }
        physical.window = Some(Arc::new(window));
        Ok(())
    }

    pub fn resume(&mut self, gpu_map: &[usize]) {
        self.extra = None;
        for physical in self.physical.values_mut() {
            physical.gpu = gpu_map.get(physical.gpu).copied().unwrap_or(physical.gpu);
        }
    }
}

#[cfg(test)]
mod tests;
