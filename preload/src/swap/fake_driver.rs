//! A fake of the CUDA driver for unit tests. It keeps each physical memory, address range and
//! descriptor as an object of its own.
//!
//! It has the limits that were measured on the real driver. It does not export memory that was
//! imported, or that was created without a handle type. A copy must be inside one registration of
//! host memory or outside of all. Registered memory must have pages with the access that the flags
//! request. A test can make any of its functions fail. Memory must not be unmapped while a copy from
//! it is in progress.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::Mutex;

use affinode_cuda_sys::{
    MemAccessDesc, MemAllocationProp, MemPoolProps, POSIX_DESCRIPTOR, device_attribute, result,
};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::fstat;
use nix::unistd::pipe2;

/// The primary context of the device, to which all memory belongs.
pub const CONTEXT: usize = 0x77;
/// The default pool of the device.
pub const DEFAULT_POOL: usize = 0x900;
/// Ordinal of the fake device. No other test uses this number.
pub const DEVICE: i32 = 61;
const GRANULE_BYTES: usize = 2 << 20;
const SLOT_BYTES: u64 = 2 << 20;
/// Stack limit of a new context, in bytes for each of its threads.
pub const STACK_LIMIT: usize = 1024;
/// Number of threads that the device runs at once.
pub const THREADS: usize = 4 * 2048;
/// Content of memory that was not written yet.
const FRESH: u64 = 0xdead;

/// Number of objects of each kind that exist on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Handles of physical memory.
    pub handles: usize,
    /// Mappings of physical memory at addresses.
    pub mappings: usize,
    /// Ranges of reserved addresses.
    pub ranges: usize,
    /// Number of exports with at least one open descriptor.
    pub descriptors: usize,
    /// Number of existing streams.
    pub streams: usize,
}

#[derive(Clone, Copy)]
struct Handle {
    object: u64,
    exportable: bool,
}

/// Exported memory. Its descriptor is one end of a pipe. The other end shows when the last copy of
/// the descriptor is closed.
struct Export {
    object: u64,
    inode: u64,
    other: OwnedFd,
}

impl Export {
    fn is_held(&self) -> bool {
        let mut polled = [PollFd::new(self.other.as_fd(), PollFlags::empty())];
        poll(&mut polled, PollTimeout::ZERO).unwrap() == 0
    }
}

#[derive(Default)]
struct Device {
    next: u64,
    handles: BTreeMap<u64, Handle>,
    /// Mapped physical memory. The key is the address, the value is the number of the physical
    /// memory object.
    mappings: BTreeMap<u64, u64>,
    ranges: BTreeMap<u64, usize>,
    /// Content of each slot that was written. The key is a physical memory object and the slot's
    /// index in it.
    contents: BTreeMap<(u64, u64), u64>,
    /// Contents of the memory that `cuMemAlloc` of the fake driver has allocated, by address.
    own: BTreeMap<u64, Vec<u64>>,
    /// Number of calls of `cuMemFree` so far. In the real driver each of them waits for work.
    frees: usize,
    exports: Vec<Export>,
    /// Sizes of registered host memory, by address.
    registered: BTreeMap<usize, usize>,
    streams: usize,
    events: BTreeSet<usize>,
    /// Addresses of the mappings from which a copy is in progress. It is in progress until the stream
    /// is synchronised, or until an event that was recorded after it was reached.
    copying: BTreeSet<u64>,
    /// For each recorded event, the addresses in `copying` when it was recorded.
    recorded: BTreeMap<usize, BTreeSet<u64>>,
    /// Handles of the memory pools that exist now.
    pools: BTreeSet<usize>,
    /// All contexts other than [`CONTEXT`] that were made current so far, in order.
    pushed: Vec<usize>,
    /// Contexts for which an event was recorded, in order.
    awaited: Vec<usize>,
    /// Stack of the contexts that are pushed now, above [`CONTEXT`].
    current: Vec<usize>,
    /// Whether a thread of the application is capturing a stream in the mode GLOBAL.
    captures: bool,
    /// Whether a call has invalidated that capture.
    capture_is_invalid: bool,
    /// References that were added to contexts, one entry for each.
    attached: Vec<usize>,
    /// Contexts that have ended. They must not be made current again.
    ended: BTreeSet<usize>,
    /// The contexts of streams, by stream. All other streams are in [`CONTEXT`].
    contexts_of_streams: BTreeMap<usize, usize>,
    /// Stack limits of contexts, in bytes. A context that is not in the map has [`STACK_LIMIT`].
    limits: BTreeMap<usize, usize>,
    /// Number of slots that are still to be copied to the device before one of them gets wrong
    /// content.
    spoils: Option<usize>,
    /// Number of event queries that will still report running work. Each such query reduces the
    /// number by one.
    runs: usize,
    /// Runs once, at the next query of an event.
    at_query: Option<fn()>,
    /// Number of allocations in the driver's own pools.
    pooled: usize,
    /// Number of references to the primary context, which is [`CONTEXT`].
    primary_holds: usize,
    /// Functions that will fail once, each with the number of calls that succeed before the
    /// failure.
    fails: Vec<(&'static str, usize)>,
}

thread_local! {
    /// Stream capture mode of the calling thread. A new thread has the mode GLOBAL.
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

static DEVICE_STATE: Mutex<Option<Device>> = Mutex::new(None);

/// Handle of the fake driver, which exists as long as this value. Only one test can use it at a
/// time.
pub struct Fake(());

impl Fake {
    /// Starts a driver with an empty device.
    pub fn new() -> Fake {
        *DEVICE_STATE.lock().unwrap() = Some(Device::default());
        super::loader_lock::tests::set_loaded(true);
        Fake(())
    }

    /// Makes a function fail once, after this number of successful calls.
    pub fn fail(&self, name: &'static str, after: usize) {
        device(|device| device.fails.push((name, after)));
    }

    /// Makes the primary context active, by one reference.
    pub fn hold_primary(&self) {
        device(|device| device.primary_holds = 1);
    }

    /// Makes this many queries of an event return that the work is running.
    pub fn run_for(&self, queries: usize) {
        device(|device| device.runs = queries);
    }

    /// Makes a copy to the device write wrong content once: to a slot, after this number of slots.
    pub fn spoil_slot(&self, after: usize) {
        device(|device| device.spoils = Some(after));
    }

    /// Runs a function once, at the next query of an event.
    pub fn at_query(&self, runs: fn()) {
        device(|device| device.at_query = Some(runs));
    }

    /// Contexts for which an event was recorded, in order.
    pub fn awaited(&self) -> Vec<usize> {
        device(|device| device.awaited.clone())
    }

    /// Creates a context with this handle, and makes it current.
    pub fn create_context(&self, context: usize) {
        device(|device| {
            device.ended.remove(&context);
            device.current.push(context);
        });
    }

    /// Begins the capture of a stream in the mode GLOBAL.
    pub fn begin_capture(&self) {
        device(|device| device.captures = true);
    }

    /// Whether a call has invalidated the capture that a test has begun.
    pub fn is_capture_invalid(&self) -> bool {
        device(|device| device.capture_is_invalid)
    }

    /// Puts a stream into a context.
    pub fn put_stream(&self, stream: usize, context: usize) {
        device(|device| device.contexts_of_streams.insert(stream, context));
    }

    /// The stack limit of a context.
    pub fn stack_limit(&self, context: usize) -> usize {
        device(|device| device.limits.get(&context).copied().unwrap_or(STACK_LIMIT))
    }

    /// Number of events that exist.
    pub fn events(&self) -> usize {
        device(|device| device.events.len())
    }

    /// Cancels all failures that were set.
    pub fn fail_no_more(&self) {
        device(|device| device.fails.clear());
    }

    /// Whether a failure that a test has requested is still pending.
    pub fn is_still_to_fail(&self) -> bool {
        device(|device| !device.fails.is_empty())
    }

    /// Returns the number of objects of each kind that exist on the device now.
    pub fn held(&self) -> Held {
        device(|device| Held {
            handles: device.handles.len(),
            mappings: device.mappings.len(),
            ranges: device.ranges.len(),
            descriptors: device.exports.iter().filter(|export| export.is_held()).count(),
            streams: device.streams,
        })
    }

    /// Whether a descriptor refers to memory that this driver has exported.
    pub fn has_exported(&self, descriptor: BorrowedFd<'_>) -> bool {
        device(|device| device.exported(descriptor)).is_some()
    }

    /// Adds this number of references of the application to the primary context.
    pub fn retain_primary(&self, times: usize) {
        device(|device| device.primary_holds += times);
    }

    /// Number of calls of `cuMemFree` so far.
    pub fn frees(&self) -> usize {
        device(|device| device.frees)
    }

    /// Number of allocations in the driver's own pools.
    pub fn pooled(&self) -> usize {
        device(|device| device.pooled)
    }

    /// Addresses at which host memory is registered.
    pub fn registered(&self) -> Vec<usize> {
        device(|device| device.registered.keys().copied().collect())
    }

    /// Contexts other than [`CONTEXT`] that were made current so far.
    pub fn pushed(&self) -> Vec<usize> {
        device(|device| device.pushed.clone())
    }

    /// Number of pools that exist now.
    pub fn pools(&self) -> usize {
        device(|device| device.pools.len())
    }

    /// Writes content to the slot that is mapped at an address.
    pub fn write(&self, address: u64, content: u64) {
        device(|device| {
            let slot = device.slot(address).unwrap();
            device.contents.insert(slot, content);
        });
    }

    /// Content of the slot that is mapped at an address.
    pub fn read(&self, address: u64) -> Option<u64> {
        device(|device| device.contents.get(&device.slot(address)?).copied())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        *DEVICE_STATE.lock().unwrap() = None;
    }
}

fn device<R>(body: impl FnOnce(&mut Device) -> R) -> R {
    body(DEVICE_STATE.lock().unwrap().as_mut().unwrap())
}

impl Device {
    fn exported(&self, descriptor: BorrowedFd<'_>) -> Option<u64> {
        let inode = fstat(descriptor).ok()?.st_ino;
        self.exports.iter().find(|export| export.inode == inode).map(|export| export.object)
    }

    /// Returns the physical memory object that is mapped at an address, and the index of the slot
    /// in it. The address must be the beginning of a slot.
    fn slot(&self, address: u64) -> Option<(u64, u64)> {
        let (start, object) = self.mappings.range(..=address).next_back()?;
        let inside = ((address - start) as usize) < *self.ranges.get(start)?;
        (inside && address.is_multiple_of(SLOT_BYTES))
            .then_some((*object, (address - start) / SLOT_BYTES))
    }

    fn slots(&self, address: u64, bytes: usize) -> Option<Vec<(u64, u64)>> {
        (address..address + bytes as u64)
            .step_by(SLOT_BYTES as usize)
            .map(|at| self.slot(at))
            .collect()
    }

    /// Checks that a copy does not cross the end of a range of registered host memory. `None`: the
    /// copy crosses it.
    fn may_copy(&self, host: usize, bytes: usize) -> Option<()> {
        let end = host + bytes;
        let last = self.registered.range(..end).next_back();
        let fits =
            |(base, of): (&usize, &usize)| base + of <= host || (*base <= host && end <= base + of);
        last.is_none_or(fits).then_some(())
    }

    /// Ends the copies that were in progress when an event was recorded. `None`: no such event.
    fn reach(&mut self, event: usize) -> Option<()> {
        self.events.contains(&event).then_some(())?;
        let ended = self.recorded.remove(&event).unwrap_or_default();
        self.copying.retain(|address| !ended.contains(address));
        Some(())
    }

    fn current_context(&self) -> usize {
        self.current.last().copied().unwrap_or(CONTEXT)
    }

    /// Checks that a call which is unsafe during a capture may be made. `None`: a stream is being
    /// captured, and the calling thread's mode protects the capture. The capture is invalid then.
    fn may_disturb_captures(&mut self) -> Option<()> {
        const RELAXED: u32 = 2;
        let is_refused = self.captures && CAPTURE_MODE.get() != RELAXED;
        self.capture_is_invalid |= is_refused;
        (!is_refused).then_some(())
    }

    /// Ends a context. As in the real driver, it is then no longer current.
    fn end_context(&mut self, context: usize) {
        self.current.retain(|current| *current != context);
        self.ended.insert(context);
    }

    fn content(&self, slot: (u64, u64)) -> u64 {
        self.contents.get(&slot).copied().unwrap_or(FRESH)
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn may(&mut self, name: &'static str) -> Result<(), u32> {
        if name == "cuEventQuery"
            && let Some(runs) = self.at_query.take()
        {
            runs();
        }
        if name == "cuEventQuery" && self.runs > 0 {
            self.runs -= 1;
            return Err(result::NOT_READY);
        }
        let Some(place) = self.fails.iter().position(|(which, _)| *which == name) else {
            return Ok(());
        };
        match &mut self.fails[place].1 {
            0 => {
                self.fails.remove(place);
                Err(result::OUT_OF_MEMORY)
            }
            after => {
                *after -= 1;
                Ok(())
            }
        }
    }
}

/// Whether all pages of a range are mapped and have the access that `flags` requires: read access
/// if `flags` contains read-only, else write access.
fn has_pages(start: usize, bytes: usize, flags: u32) -> bool {
    const READ_ONLY: u32 = 8;
    let wanted = if flags & READ_ONLY == 0 { "rw" } else { "r" };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut at = start;
    for line in maps.lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
        if from <= at && at < to && rest.starts_with(wanted) {
            at = to;
        }
    }
    at >= start + bytes
}

macro_rules! functions {
    ($($symbol:literal $name:ident($($argument:ident: $type:ty),*) $body:expr;)*) => {
        $(unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            let mut state = DEVICE_STATE.lock().unwrap();
            let Some(device) = state.as_mut() else { return result::NOT_INITIALIZED };
            let body: fn(&mut Device, $($type),*) -> Option<()> = $body;
            match device.may($symbol) {
                Ok(()) if body(device, $($argument),*).is_some() => result::SUCCESS,
                Ok(()) => result::INVALID_VALUE,
                Err(code) => code,
            }
        })*

        /// Returns the address of a function of the fake driver. `None`: no fake driver exists, or
        /// it does not have the function.
        pub fn function(name: &[u8]) -> Option<usize> {
            DEVICE_STATE.lock().ok()?.as_ref()?;
            $(if name == $symbol.as_bytes() {
                return Some($name as *const () as usize);
            })*
            None
        }
    };
}

/// Writes a result to the place that the caller has passed, as the driver does.
fn set<T>(place: *mut T, value: T) -> Option<()> {
    // SAFETY: the code under test passes a place for the result.
    unsafe { place.write(value) };
    Some(())
}

functions! {
    "cuCtxGetCurrent" ctx_get_current(context: *mut usize) |device, context| set(context, device.current_context());
    "cuCtxGetDevice" ctx_get_device(device: *mut i32) |_, device| set(device, DEVICE);
    "cuDeviceGetUuid" device_get_uuid(uuid: *mut [u8; 16], device: i32) |_, uuid, device| set(uuid, [device as u8; 16]);
    "cuDeviceGetAttribute" device_get_attribute(value: *mut i32, which: i32, _device: i32) |_, value, which, _| {
        // The device's host memory is on node 0, and the device supports every feature.
        set(value, match which {
            device_attribute::HOST_NUMA_ID => 0,
            device_attribute::MULTIPROCESSOR_COUNT => 4,
            device_attribute::MAX_THREADS_PER_MULTIPROCESSOR => 2048,
            _ => 1,
        })
    };
    "cuMemGetAllocationGranularity" mem_get_granularity(
        bytes: *mut usize, _property: *const MemAllocationProp, _option: u32
    ) |_, bytes, _, _| set(bytes, GRANULE_BYTES);
    "cuMemAddressReserve" mem_address_reserve(
        address: *mut u64, bytes: usize, _align: usize, _hint: u64, _flags: u64
    ) |device, address, bytes, _, _, _| {
        let at = device.name() << 40;
        device.ranges.insert(at, bytes);
        set(address, at)
    };
    "cuMemAddressFree" mem_address_free(address: u64, bytes: usize) |device, address, bytes| {
        let is_free = !device.mappings.contains_key(&address);
        (is_free && device.ranges.remove(&address) == Some(bytes)).then_some(())
    };
    "cuMemCreate" mem_create(
        handle: *mut u64, _bytes: usize, property: *const MemAllocationProp, _flags: u64
    ) |device, handle, _, property, _| {
        // SAFETY: the code under test passes a pointer to properties.
        let exportable = unsafe { property.read() }.handle_types & POSIX_DESCRIPTOR != 0;
        let (name, object) = (device.name(), device.name());
        device.handles.insert(name, Handle { object, exportable });
        set(handle, name)
    };
    "cuMemRetainAllocationHandle" mem_retain_handle(handle: *mut u64, address: u64) |device, handle, address| {
        let (start, object) = device.mappings.range(..=address).next_back()?;
        let inside = ((address - start) as usize) < *device.ranges.get(start)?;
        let object = inside.then_some(*object)?;
        let exportable = device.handles.values().any(|made| made.object == object && made.exportable);
        let name = device.name();
        device.handles.insert(name, Handle { object, exportable });
        set(handle, name)
    };
    "cuMemRelease" mem_release(handle: u64) |device, handle| device.handles.remove(&handle).map(drop);
    "cuMemMap" mem_map(address: u64, bytes: usize, _offset: usize, handle: u64, _flags: u64) |device, address, bytes, _, handle, _| {
        let object = device.handles.get(&handle)?.object;
        let is_free = !device.mappings.contains_key(&address);
        (is_free && device.ranges.get(&address) == Some(&bytes)).then_some(())?;
        device.mappings.insert(address, object);
        Some(())
    };
    "cuMemUnmap" mem_unmap(address: u64, _bytes: usize) |device, address, _| {
        assert!(!device.copying.contains(&address), "memory is unmapped during a copy from it");
        device.mappings.remove(&address).map(drop)
    };
    "cuMemSetAccess" mem_set_access(
        address: u64, _bytes: usize, _access: *const MemAccessDesc, _many: usize
    ) |device, address, _, _, _| device.mappings.contains_key(&address).then_some(());
    "cuMemExportToShareableHandle" mem_export(
        shareable: *mut core::ffi::c_void, handle: u64, _kind: u32, _flags: u64
    ) |device, shareable, handle, _, _| {
        let handle = device.handles.get(&handle).filter(|handle| handle.exportable)?;
        let (other, shared) = pipe2(OFlag::O_CLOEXEC).ok()?;
        let inode = fstat(&shared).ok()?.st_ino;
        device.exports.push(Export { object: handle.object, inode, other });
        set(shareable.cast(), shared.into_raw_fd())
    };
    "cuMemGetHandleForAddressRange" mem_get_handle_for_range(
        _handle: *mut core::ffi::c_void, address: u64, _bytes: usize, _kind: u32, _flags: u64
    ) |device, _, address, _, _, _| device.slot(address).map(drop);
    "cuMemImportFromShareableHandle" mem_import(handle: *mut u64, shareable: usize, _kind: u32) |device, handle, shareable, _| {
        // SAFETY: the code under test lends the descriptor. A number that is not a descriptor
        // refers to no file.
        let object = device.exported(unsafe { BorrowedFd::borrow_raw(shareable as i32) })?;
        let name = device.name();
        device.handles.insert(name, Handle { object, exportable: false });
        set(handle, name)
    };
    "cuMemcpyDtoDAsync_v2" copy_across(to: u64, from: u64, bytes: usize, _stream: *mut core::ffi::c_void) |device, to, from, bytes, _| {
        for (to, from) in device.slots(to, bytes)?.into_iter().zip(device.slots(from, bytes)?) {
            let content = device.content(from);
            device.contents.insert(to, content);
        }
        Some(())
    };
    "cuMemHostRegister_v2" host_register(start: *mut core::ffi::c_void, bytes: usize, flags: u32) |device, start, bytes, flags| {
        let start = start as usize;
        let last = device.registered.range(..start + bytes).next_back();
        let is_free = last.is_none_or(|(base, of)| base + of <= start);
        (is_free && has_pages(start, bytes, flags)).then_some(())?;
        device.registered.insert(start, bytes);
        Some(())
    };
    "cuMemHostUnregister" host_unregister(start: *mut core::ffi::c_void) |device, start| {
        device.registered.remove(&(start as usize)).map(drop)
    };
    "cuMemcpyDtoHAsync_v2" copy_out(
        to: *mut core::ffi::c_void, from: u64, bytes: usize, _stream: *mut core::ffi::c_void
    ) |device, to, from, bytes, _| {
        device.may_copy(to as usize, bytes)?;
        if let Some(words) = device.own.get(&from) {
            let many = (bytes / size_of::<u64>()).min(words.len());
            // SAFETY: the code under test passes memory for this many words.
            unsafe { to.cast::<u64>().copy_from_nonoverlapping(words.as_ptr(), many) };
            return Some(());
        }
        device.copying.extend(device.mappings.range(..=from).next_back().map(|(start, _)| *start));
        for (n, slot) in device.slots(from, bytes)?.into_iter().enumerate() {
            set(to.wrapping_byte_add(n * SLOT_BYTES as usize).cast(), device.content(slot))?;
        }
        Some(())
    };
    "cuMemcpyHtoDAsync_v2" copy_in(
        to: u64, from: *const core::ffi::c_void, bytes: usize, _stream: *mut core::ffi::c_void
    ) |device, to, from, bytes, _| {
        device.may_copy(from as usize, bytes)?;
        if let Some(words) = device.own.get_mut(&to) {
            let many = (bytes / size_of::<u64>()).min(words.len());
            // SAFETY: the code under test passes this many words.
            unsafe { from.cast::<u64>().copy_to_nonoverlapping(words.as_mut_ptr(), many) };
            return Some(());
        }
        for (n, slot) in device.slots(to, bytes)?.into_iter().enumerate() {
            // SAFETY: the code under test passes memory of this many slots.
            let content = unsafe { from.wrapping_byte_add(n * SLOT_BYTES as usize).cast::<u64>().read() };
            let is_wrong = device.spoils == Some(0);
            device.spoils = device.spoils.and_then(|after| after.checked_sub(1));
            device.contents.insert(slot, if is_wrong { FRESH } else { content });
        }
        Some(())
    };
    "cuMemsetD8Async" clear(to: u64, _value: u8, bytes: usize, _stream: *mut core::ffi::c_void) |device, to, _, bytes, _| {
        for slot in device.slots(to, bytes)? {
            device.contents.insert(slot, 0);
        }
        Some(())
    };
    "cuMemAlloc_v2" mem_alloc(address: *mut u64, bytes: usize) |device, address, bytes| {
        let at = device.name() << 40;
        device.own.insert(at, vec![0; bytes.div_ceil(size_of::<u64>())]);
        set(address, at)
    };
    "cuMemAllocPitch_v2" mem_alloc_pitch(
        address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32
    ) |device, address, pitch, width, height, element| {
        [4, 8, 16].contains(&element).then_some(())?;
        let (at, row) = (device.name() << 40, width.next_multiple_of(512));
        device.own.insert(at, vec![0; row * height / size_of::<u64>()]);
        set(pitch, row)?;
        set(address, at)
    };
    "cuMemFree_v2" mem_free(address: u64) |device, address| {
        device.frees += 1;
        device.own.remove(&address).map(drop)
    };
    "cuModuleLoadData" module_load(module: *mut usize, _image: *const core::ffi::c_void) |device, module, _| {
        device.may_disturb_captures()?;
        set(module, 1)
    };
    "cuModuleGetFunction" module_get(function: *mut usize, _module: usize, _name: *const core::ffi::c_char) |_, function, _, _| set(function, 1);
    "cuModuleUnload" module_unload(_module: usize) |device, _| device.may_disturb_captures();
    "cuLaunchKernel" launch(
        _kernel: usize, _x: u32, _y: u32, _z: u32, _bx: u32, _by: u32, _bz: u32, _shared: u32,
        _stream: *mut core::ffi::c_void, arguments: *mut *mut core::ffi::c_void,
        _extra: *mut *mut core::ffi::c_void
    ) |device, _, _, _, _, _, _, _, _, _, arguments, _| {
        // SAFETY: these are the arguments of the only kernel: its table, and the number of entries.
        let table = unsafe { arguments.read().cast::<u64>().read() };
        let mut words = device.own.remove(&table)?;
        for digest in words.chunks_exact_mut(2).filter(|digest| digest[0] != 0) {
            let content = device.content(device.slot(digest[0])?);
            (digest[0], digest[1]) = if content == 0 { (0, u64::MAX) } else { (content, 7) };
        }
        device.own.insert(table, words);
        Some(())
    };
    "cuStreamCreate" stream_create(stream: *mut *mut core::ffi::c_void, _flags: u32) |device, stream, _| {
        device.streams += 1;
        set(stream, core::ptr::null_mut())
    };
    "cuStreamSynchronize" stream_synchronize(_stream: *mut core::ffi::c_void) |device, _| {
        device.copying.clear();
        Some(())
    };
    "cuStreamDestroy_v2" stream_destroy(_stream: *mut core::ffi::c_void) |device, _| {
        device.streams -= 1;
        Some(())
    };
    "cuCtxSynchronize" ctx_synchronize() |_| Some(());
    "cuCtxPushCurrent_v2" ctx_push_current(context: usize) |device, context| {
        // The real driver ends the process when such a context is popped (H200, driver 580.159).
        assert!(!device.ended.contains(&context), "a context is made current after its end");
        device.pushed.push(context);
        device.current.push(context);
        Some(())
    };
    "cuCtxPopCurrent_v2" ctx_pop_current(context: *mut usize) |device, context| {
        set(context, device.current.pop()?)
    };
    "cuCtxGetLimit" ctx_get_limit(limit: *mut usize, _which: u32) |device, limit, _| {
        set(limit, device.limits.get(&device.current_context()).copied().unwrap_or(STACK_LIMIT))
    };
    "cuCtxSetLimit" ctx_set_limit(_which: u32, limit: usize) |device, _, limit| {
        device.limits.insert(device.current_context(), limit);
        Some(())
    };
    "cuDevicePrimaryCtxGetState" primary_get_state(_device: i32, flags: *mut u32, active: *mut i32) |device, _, flags, active| {
        set(flags, 0)?;
        set(active, i32::from(device.primary_holds > 0))
    };
    "cuDevicePrimaryCtxRetain" primary_retain(context: *mut usize, _device: i32) |device, context, _| {
        device.primary_holds += 1;
        set(context, CONTEXT)
    };
    "cuDevicePrimaryCtxRelease_v2" primary_release(_device: i32) |device, _| {
        device.primary_holds = device.primary_holds.checked_sub(1)?;
        Some(())
    };
    "cuCtxCreate_v4" ctx_create_v4(
        context: *mut usize, _parameters: usize, _flags: u32, _device: i32
    ) |device, context, _, _, _| {
        let name = device.name() as usize;
        device.current.push(name);
        set(context, name)
    };
    "cuCtxDestroy_v2" ctx_destroy(context: usize) |device, context| {
        device.end_context(context);
        Some(())
    };
    "cuCtxAttach" ctx_attach(context: *mut usize, _flags: u32) |device, context, _| {
        let current = device.current_context();
        device.attached.push(current);
        set(context, current)
    };
    "cuCtxDetach" ctx_detach(context: usize) |device, context| {
        match device.attached.iter().position(|attached| *attached == context) {
            Some(place) => drop(device.attached.remove(place)),
            None => device.end_context(context),
        }
        Some(())
    };
    "cuCtxFromGreenCtx" ctx_from_green(context: *mut usize, green: usize) |_, context, green| set(context, green);
    "cuGreenCtxDestroy" green_ctx_destroy(green: usize) |device, green| {
        device.end_context(green);
        Some(())
    };
    "cuThreadExchangeStreamCaptureMode" exchange_mode(mode: *mut u32) |_, mode| {
        // SAFETY: the code under test passes a place for the mode.
        set(mode, CAPTURE_MODE.replace(unsafe { mode.read() }))
    };
    "cuEventCreate" event_create(event: *mut usize, _flags: u32) |device, event, _| {
        let name = device.name() as usize;
        device.events.insert(name);
        set(event, name)
    };
    "cuEventDestroy_v2" event_destroy(event: usize) |device, event| device.events.remove(&event).then_some(());
    "cuCtxRecordEvent" ctx_record_event(context: usize, event: usize) |device, context, event| {
        device.events.contains(&event).then_some(())?;
        device.awaited.push(context);
        Some(())
    };
    "cuEventRecord" event_record(event: usize, _stream: *mut core::ffi::c_void) |device, event, _| {
        device.events.contains(&event).then_some(())?;
        device.recorded.insert(event, device.copying.clone());
        Some(())
    };
    "cuEventQuery" event_query(event: usize) |device, event| device.reach(event);
    "cuEventSynchronize" event_synchronize(event: usize) |device, event| device.reach(event);
    "cuMemAllocAsync" mem_alloc_async(address: *mut u64, _bytes: usize, _stream: *mut core::ffi::c_void) |device, address, _, _| {
        device.pooled += 1;
        set(address, device.name() << 40)
    };
    "cuMemAllocFromPoolAsync" mem_alloc_from_pool(
        address: *mut u64, _bytes: usize, _pool: usize, _stream: *mut core::ffi::c_void
    ) |device, address, _, _, _| {
        device.pooled += 1;
        set(address, device.name() << 40)
    };
    "cuMemFreeAsync" mem_free_async(_address: u64, _stream: *mut core::ffi::c_void) |device, _, _| {
        device.pooled = device.pooled.checked_sub(1)?;
        Some(())
    };
    "cuDeviceGetMemPool" device_get_pool(pool: *mut usize, _device: i32) |_, pool, _| set(pool, DEFAULT_POOL);
    "cuDeviceGetDefaultMemPool" device_get_default_pool(pool: *mut usize, _device: i32) |_, pool, _| set(pool, DEFAULT_POOL);
    "cuMemPoolCreate" pool_create(pool: *mut usize, _props: *const MemPoolProps) |device, pool, _| {
        let name = device.name() as usize;
        device.pools.insert(name);
        set(pool, name)
    };
    "cuMemPoolDestroy" pool_destroy(pool: usize) |device, pool| device.pools.remove(&pool).then_some(());
    "cuMemPoolGetAttribute" pool_get_attribute(pool: usize, _which: u32, value: *mut core::ffi::c_void) |device, pool, _, value| {
        (pool == DEFAULT_POOL || device.pools.contains(&pool)).then_some(())?;
        set(value.cast::<u64>(), 0)
    };
    "cuMemPoolSetAttribute" pool_set_attribute(_pool: usize, _which: u32, _value: *mut core::ffi::c_void) |_, _, _, _| Some(());
    "cuMemPoolSetAccess" pool_set_access(_pool: usize, _access: *const MemAccessDesc, _many: usize) |_, _, _, _| Some(());
    "cuMemPoolTrimTo" pool_trim_to(_pool: usize, _bytes: usize) |_, _, _| Some(());
    "cuStreamGetCtx" stream_get_context(stream: *mut core::ffi::c_void, context: *mut usize) |device, stream, context| {
        set(context, device.contexts_of_streams.get(&(stream as usize)).copied().unwrap_or(CONTEXT))
    };
    "cuStreamGetId" stream_get_id(stream: *mut core::ffi::c_void, id: *mut u64) |_, stream, id| set(id, stream as u64);
    "cuStreamIsCapturing" stream_is_capturing(_stream: *mut core::ffi::c_void, status: *mut u32) |_, _, status| set(status, 0);
}
