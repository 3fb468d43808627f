//! A simulated CUDA driver for tests, one for each thread. It simulates memory, mappings,
//! registrations, streams and events, and checks each rule of the real driver that a copier can
//! break.
//!
//! A broken rule is recorded as a fault. It causes no panic, because the simulated functions are C
//! functions like the driver's, and a panic must not unwind out of a C function. Fresh memory is
//! filled with [`SECRET`], which represents another tenant's content. Host memory and device memory
//! are really copied.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    ffi::c_void,
    os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd},
    rc::Rc,
};

use affinode_cuda_sys::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, LOCATION_DEVICE, MemAccessDesc, MemAllocationProp, result,
};
use rustix::fs::MemfdFlags;

use super::{
    CudaDriver, CudaError,
    cuda::{Functions, POSIX_DESCRIPTOR},
};

/// Byte that fills fresh device memory. It represents another tenant's content.
pub const SECRET: u8 = 0xee;
/// UUID of the simulated device on which the copier has its context.
pub const UUID: [u8; 16] = [7; 16];
/// Text of [`UUID`] in NVML's notation.
pub const UUID_TEXT: &str = "GPU-07070707-0707-0707-0707-070707070707";

const ALREADY_MAPPED: u32 = 208;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;
/// Smallest error code that leaves the simulated context unusable.
const STICKY: u32 = 700;
const INVALID_HANDLE: u32 = 400;
const PAGE_BYTES: usize = 4096;
/// Size in bytes of a grain, the unit in which the simulated driver records which device memory was
/// filled.
const GRAIN_BYTES: usize = 64 << 10;

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::new(Fake::default());
}

#[derive(Debug)]
struct Memory {
    bytes: usize,
    /// Value with which every byte of the memory is filled before content is copied to it.
    byte: u8,
    /// Content that was copied to the memory. Empty if nothing was copied.
    content: Vec<u8>,
    /// For each grain of the memory, whether content was copied to it.
    filled: Vec<bool>,
    rdma: bool,
    /// Whether another process than the copier created the memory.
    imported: bool,
}

impl Memory {
    fn content(&mut self) -> &mut Vec<u8> {
        self.content.resize(self.bytes, self.byte);
        &mut self.content
    }
}

#[derive(Clone, Copy, Debug)]
struct Mapping {
    memory: u64,
    bytes: usize,
    writable: bool,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    In { host: usize, device: u64, bytes: usize },
    Out { host: usize, device: u64, bytes: usize },
    Record { event: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Idle,
    Pending,
    Failed(u32),
}

/// A driver call that the simulated driver will refuse.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    call: Option<&'static str>,
    /// Number of matching calls that succeed before the simulated driver refuses one.
    after: usize,
    code: u32,
}

/// Number of driver objects of each kind that still exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Number of existing handles of device memory.
    pub handles: usize,
    /// Number of existing mappings of device memory.
    pub mappings: usize,
    /// Number of reserved ranges of device addresses.
    pub reservations: usize,
    /// Number of existing registrations of host memory.
    pub registrations: usize,
    /// Number of existing streams.
    pub streams: usize,
    /// Number of existing events.
    pub events: usize,
}

/// State of the simulated driver.
#[derive(Debug, Default)]
pub struct Fake {
    total_bytes: u64,
    used_by_others_bytes: u64,
    /// VRAM in bytes that each allocation must leave free, because the driver's restore needs it.
    floor_bytes: u64,
    rdma_capable: bool,
    compute_mode: i32,
    /// Stack limit that the copier set for the context. `None` if the context has its initial
    /// limit.
    stack_limit: Option<usize>,
    next: u64,
    memories: BTreeMap<u64, Memory>,
    handles: BTreeMap<u64, u64>,
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, Mapping>,
    registered: BTreeMap<usize, usize>,
    streams: BTreeMap<usize, VecDeque<Work>>,
    events: BTreeMap<usize, Event>,
    exported: BTreeMap<(u64, u64), u64>,
    /// Whether queued copies wait until the test calls [`run_copies`].
    copies_wait: bool,
    /// Error code with which the next copies fail. 0 means that they succeed.
    copies_fail: u32,
    sticky: u32,
    refusals: Vec<Refusal>,
    calls: Vec<&'static str>,
    faults: Vec<String>,
}

/// Resets the simulated driver of this thread to a GPU with this much device memory.
pub fn reset(total_bytes: u64) {
    FAKE.replace(Fake { total_bytes, rdma_capable: true, next: 1, ..Fake::default() });
}

/// Creates a context on the simulated GPU with the UUID [`UUID`].
///
/// # Errors
/// [`CudaError`]: a test ordered a call to be refused.
pub fn open() -> Result<Rc<CudaDriver>, CudaError> {
    CudaDriver::with(functions(), UUID_TEXT)
}

/// Calls `body` with the state of this thread's simulated driver.
pub fn with<T>(body: impl FnOnce(&mut Fake) -> T) -> T {
    FAKE.with_borrow_mut(body)
}

/// Executes all queued copies and events of all streams.
pub fn run_copies() {
    with(|fake| {
        for stream in fake.streams.keys().copied().collect::<Vec<_>>() {
            fake.run(stream);
        }
    });
}

/// Creates device memory of another process, filled with a byte. Returns a descriptor with which
/// the copier can import it.
///
/// # Errors
/// The `errno` of the kernel.
pub fn made_by_another(bytes: usize, byte: u8) -> std::io::Result<OwnedFd> {
    with(|fake| {
        let memory = fake.add(bytes, byte, false, true);
        fake.export(memory)
    })
}

/// Returns the content of the memory behind an exported descriptor, as a process that has imported
/// it sees it.
pub fn content(exported: BorrowedFd<'_>) -> Option<Vec<u8>> {
    with(|fake| {
        let memory = fake.exported.get(&identity(exported)?)?;
        fake.memories.get_mut(memory).map(|memory| memory.content().clone())
    })
}

/// Returns whether other devices on the bus may access the memory behind an exported descriptor.
pub fn is_rdma(exported: BorrowedFd<'_>) -> Option<bool> {
    with(|fake| {
        let memory = fake.exported.get(&identity(exported)?)?;
        fake.memories.get(memory).map(|memory| memory.rdma)
    })
}

fn identity(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

impl Fake {
    /// Returns the number of objects that the copier created and did not release.
    pub fn left(&self) -> Left {
        Left {
            handles: self.handles.len(),
            mappings: self.mapped.len(),
            reservations: self.reserved.len(),
            registrations: self.registered.len(),
            streams: self.streams.len(),
            events: self.events.len(),
        }
    }

    /// Returns the rules of the driver that the copier has broken.
    pub fn faults(&self) -> &[String] {
        &self.faults
    }

    /// Returns the names of all driver calls so far.
    pub fn calls(&self) -> &[&'static str] {
        &self.calls
    }

    /// Returns the amount of registered host memory, in bytes.
    pub fn registered_bytes(&self) -> usize {
        self.registered.values().sum()
    }

    /// Returns the amount of device memory that the copier created and still has a handle for, in
    /// bytes.
    pub fn made_bytes(&self) -> u64 {
        let made = |id: &&u64| self.memories.get(id).is_some_and(|memory| !memory.imported);
        self.handles.values().filter(made).map(|id| self.bytes_of(*id)).sum()
    }

    /// Returns the amount of other processes' device memory for which the copier has a handle, in
    /// bytes.
    pub fn imported_bytes(&self) -> u64 {
        let imported = |id: &&u64| self.memories.get(id).is_some_and(|memory| memory.imported);
        self.handles.values().filter(imported).map(|id| self.bytes_of(*id)).sum()
    }

    /// Sets the amount of device memory that other processes use.
    pub fn others_use(&mut self, bytes: u64) {
        self.used_by_others_bytes = bytes;
    }

    /// Sets the number of bytes that must stay free. A further allocation that leaves less is a
    /// fault.
    pub fn must_leave(&mut self, bytes: u64) {
        self.floor_bytes = bytes;
    }

    /// Makes further copies wait until the test calls [`run_copies`].
    pub fn copies_wait(&mut self) {
        self.copies_wait = true;
    }

    /// Makes further copies fail with this error code.
    pub fn copies_fail(&mut self, code: u32) {
        self.copies_fail = code;
    }

    /// Simulates a GPU whose memory other devices on the bus cannot access.
    pub fn is_not_rdma_capable(&mut self) {
        self.rdma_capable = false;
    }

    /// Returns the stack limit that the copier set for the context. `None` if the context has its
    /// initial limit.
    pub fn stack_limit(&self) -> Option<usize> {
        self.stack_limit
    }

    /// Sets the compute mode of the simulated GPU.
    pub fn compute_mode(&mut self, mode: i32) {
        self.compute_mode = mode;
    }

    /// Makes the simulated driver refuse one call with the error `code`, after `after` matching
    /// calls. `call` is the name of the function to refuse. `None` matches any function.
    pub fn refuse(&mut self, call: Option<&'static str>, after: usize, code: u32) {
        self.refusals.push(Refusal { call, after, code });
    }

    fn bytes_of(&self, memory: u64) -> u64 {
        self.memories.get(&memory).map_or(0, |memory| memory.bytes as u64)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn fault(&mut self, what: impl Into<String>) {
        self.faults.push(what.into());
    }

    fn free_bytes(&self) -> u64 {
        let own: u64 = self.memories.values().filter(|m| !m.imported).map(|m| m.bytes as u64).sum();
        self.total_bytes.saturating_sub(self.used_by_others_bytes + own)
    }

    fn add(&mut self, bytes: usize, byte: u8, rdma: bool, imported: bool) -> u64 {
        let id = self.number();
        let filled = vec![imported; bytes.div_ceil(GRAIN_BYTES)];
        self.memories
            .insert(id, Memory { bytes, byte, content: Vec::new(), filled, rdma, imported });
        id
    }

    fn export(&mut self, memory: u64) -> std::io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create("device-memory", MemfdFlags::CLOEXEC)?;
        if let Some(identity) = identity(file.as_fd()) {
            self.exported.insert(identity, memory);
        }
        Ok(file)
    }

    /// Returns the mapping of device memory that contains a range, if there is one.
    fn mapping(&self, device: u64, bytes: usize) -> Option<(u64, usize, Mapping)> {
        let (start, mapping) = self.mapped.range(..=device).next_back()?;
        let offset = usize::try_from(device - start).ok()?;
        (offset + bytes <= mapping.bytes).then_some((*start, offset, *mapping))
    }

    /// Returns whether a range of host memory lies within one registration.
    fn is_registered(&self, host: usize, bytes: usize) -> bool {
        self.registered
            .range(..=host)
            .next_back()
            .is_some_and(|(start, of)| host + bytes <= start + of)
    }

    fn begin(&mut self, stream: usize, work: Work) -> Result<(), u32> {
        if let Work::In { host, device, bytes } | Work::Out { host, device, bytes } = work {
            if !self.is_registered(host, bytes) {
                self.fault("a copy uses host memory that is not within one registration");
                return Err(result::INVALID_VALUE);
            }
            if !self.mapping(device, bytes).is_some_and(|(_, _, mapping)| mapping.writable) {
                self.fault(
                    "a copy uses device memory that is not mapped, or is mapped without access",
                );
                return Err(result::INVALID_VALUE);
            }
        }
        self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?.push_back(work);
        if !self.copies_wait {
            self.run(stream);
        }
        Ok(())
    }

    fn run(&mut self, stream: usize) {
        while let Some(work) = self.streams.get_mut(&stream).and_then(VecDeque::pop_front) {
            match work {
                Work::Record { event } => {
                    let failed = self.sticky;
                    if let Some(event) = self.events.get_mut(&event) {
                        *event = if failed == 0 { Event::Idle } else { Event::Failed(failed) };
                    }
                }
                _ if self.copies_fail != 0 => self.sticky = self.copies_fail,
                Work::In { host, device, bytes } => self.copy(host, device, bytes, true),
                Work::Out { host, device, bytes } => self.copy(host, device, bytes, false),
            }
        }
    }

    fn copy(&mut self, host: usize, device: u64, bytes: usize, is_in: bool) {
        let mapping = self.mapping(device, bytes);
        let (true, Some((_, offset, mapping))) = (self.is_registered(host, bytes), mapping) else {
            return self.fault("memory was unmapped during a copy");
        };
        match resident(host, bytes) {
            None => return self.fault("host memory was unmapped during a copy"),
            // The device uses the pages that were present at the registration. If a process punches
            // holes into its file afterwards, it harms only itself, and there is no content to copy
            // here.
            Some(false) => return self.filled(mapping.memory, offset, bytes, is_in),
            Some(true) => {}
        }
        let Some(memory) = self.memories.get_mut(&mapping.memory) else {
            return self.fault("a mapping refers to memory that does not exist");
        };
        let host = std::ptr::with_exposed_provenance_mut::<u8>(host);
        let device = &mut memory.content()[offset..offset + bytes];
        // SAFETY: the range was just checked to be mapped and registered, and its owner keeps it so
        // until the copy has ended. Nothing else on this thread has a reference to it.
        unsafe {
            if is_in {
                host.copy_to_nonoverlapping(device.as_mut_ptr(), bytes);
            } else {
                host.copy_from_nonoverlapping(device.as_ptr(), bytes);
            }
        }
        self.filled(mapping.memory, offset, bytes, is_in);
    }

    fn filled(&mut self, memory: u64, offset: usize, bytes: usize, is_in: bool) {
        if let Some(memory) = self.memories.get_mut(&memory)
            && is_in
        {
            memory.filled[offset / GRAIN_BYTES..(offset + bytes).div_ceil(GRAIN_BYTES)].fill(true);
        }
    }

    fn has_work_on_device(&self, start: u64, bytes: usize) -> bool {
        self.streams.values().flatten().any(|work| match *work {
            Work::In { device, bytes: many, .. } | Work::Out { device, bytes: many, .. } => {
                device < start + bytes as u64 && start < device + many as u64
            }
            Work::Record { .. } => false,
        })
    }

    fn has_work_on_host(&self, start: usize, bytes: usize) -> bool {
        self.streams.values().flatten().any(|work| match *work {
            Work::In { host, bytes: many, .. } | Work::Out { host, bytes: many, .. } => {
                host < start + bytes && start < host + many
            }
            Work::Record { .. } => false,
        })
    }

    /// Removes device memory that has neither a handle nor a mapping. Memory that other processes
    /// created or imported stays.
    fn forget(&mut self, id: u64) {
        let is_held = self.handles.values().any(|of| *of == id)
            || self.mapped.values().any(|of| of.memory == id)
            || self.exported.values().any(|of| *of == id);
        if !is_held {
            self.memories.remove(&id);
        }
    }

    fn refusal(&mut self, call: &'static str) -> Option<u32> {
        let mut code = None;
        for refusal in &mut self.refusals {
            if refusal.call.is_none_or(|name| name == call) {
                if refusal.after == 0 {
                    code = Some(refusal.code);
                }
                refusal.after = refusal.after.wrapping_sub(1);
            }
        }
        code
    }

    fn enter(call: &'static str, body: impl FnOnce(&mut Fake) -> Result<(), u32>) -> u32 {
        with(|fake| {
            fake.calls.push(call);
            if let Some(code) = fake.refusal(call) {
                if (STICKY..ALREADY_REGISTERED).contains(&code) {
                    fake.sticky = code;
                }
                return code;
            }
            if fake.sticky != 0 {
                return fake.sticky;
            }
            body(fake).err().unwrap_or(result::SUCCESS)
        })
    }
}

/// Returns whether all pages of a range of host memory are resident. Returns `None` if the range is
/// not mapped.
fn resident(start: usize, bytes: usize) -> Option<bool> {
    let first = start / PAGE_BYTES * PAGE_BYTES;
    let bytes = start + bytes - first;
    let mut pages = vec![0_u8; bytes.div_ceil(PAGE_BYTES)];
    let start = std::ptr::with_exposed_provenance_mut::<c_void>(first);
    // SAFETY: the kernel only examines the range, and writes one byte for each page.
    let done = unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) };
    (done == 0).then(|| pages.iter().all(|page| page & 1 == 1))
}

macro_rules! fakes {
    ($($name:ident($($argument:ident: $kind:ty),*) |$fake:ident| $body:block)*) => {
        $(
            unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
                Fake::enter(stringify!($name), |$fake| $body)
            }
        )*

        fn functions() -> Functions {
            Functions { $($name,)* _library: None }
        }
    };
}

/// Writes the result of a simulated driver call to the caller's pointer.
fn give<T>(to: *mut T, value: T) -> Result<(), u32> {
    // SAFETY: the callers of these functions pass pointers to their own locals, or null.
    match unsafe { to.as_mut() } {
        Some(to) => {
            *to = value;
            Ok(())
        }
        None => Err(result::INVALID_VALUE),
    }
}

fakes! {
    init(_flags: u32) |_fake| { Ok(()) }
    device_count(to: *mut i32) |_fake| { give(to, 2) }
    device_get(to: *mut i32, ordinal: i32) |_fake| { give(to, ordinal + 10) }
    device_uuid(to: *mut [u8; 16], device: i32) |_fake| {
        // The second device has the UUID [`UUID`], on which the copier creates its context.
        give(to, if device == 11 { UUID } else { [1; 16] })
    }
    device_attribute(to: *mut i32, attribute: i32, device: i32) |fake| {
        if device != 11 {
            fake.fault("the attribute of another device was read");
        }
        let rdma = affinode_cuda_sys::device_attribute::RDMA_WITH_VIRTUAL_MEMORY;
        let value = if attribute == rdma { i32::from(fake.rdma_capable) } else { fake.compute_mode };
        give(to, value)
    }
    primary_retain(to: *mut usize, device: i32) |_fake| { give(to, device as usize) }
    ctx_set_current(context: usize) |_fake| {
        if context == 11 { Ok(()) } else { Err(result::INVALID_CONTEXT) }
    }
    ctx_set_limit(which: u32, value: usize) |fake| {
        if which == 0 {
            fake.stack_limit = Some(value);
        }
        Ok(())
    }
    mem_get_info(free: *mut usize, total: *mut usize) |fake| {
        give(free, fake.free_bytes() as usize)?;
        give(total, fake.total_bytes as usize)
    }
    mem_create(to: *mut u64, bytes: usize, property: *const MemAllocationProp, _flags: u64) |fake| {
        // SAFETY: the pointer is to a local of the caller.
        let property = unsafe { property.as_ref() }.ok_or(result::INVALID_VALUE)?;
        let fits = property.kind == ALLOCATION_PINNED
            && property.location_type == LOCATION_DEVICE
            && property.location_id == 11
            && property.handle_types == POSIX_DESCRIPTOR;
        let rdma = property.gpu_direct_rdma == 1;
        if !fits || (rdma && !fake.rdma_capable) {
            fake.fault("memory was created with invalid properties");
            return Err(result::INVALID_VALUE);
        }
        let free_bytes = fake.free_bytes();
        if bytes as u64 > free_bytes {
            return Err(result::OUT_OF_MEMORY);
        }
        if free_bytes - (bytes as u64) < fake.floor_bytes {
            fake.fault("memory was created in VRAM that is reserved for a restore");
        }
        let memory = fake.add(bytes, SECRET, rdma, false);
        let handle = fake.number();
        fake.handles.insert(handle, memory);
        give(to, handle)
    }
    mem_release(handle: u64) |fake| {
        let memory = fake.handles.remove(&handle).ok_or(result::INVALID_VALUE)?;
        fake.forget(memory);
        Ok(())
    }
    mem_address_reserve(to: *mut u64, bytes: usize, _align: usize, _wanted: u64, _flags: u64) |fake| {
        if bytes == 0 {
            return Err(result::INVALID_VALUE);
        }
        let address = fake.number() << 40;
        fake.reserved.insert(address, bytes);
        give(to, address)
    }
    mem_address_free(address: u64, bytes: usize) |fake| {
        if fake.mapped.contains_key(&address) {
            fake.fault("addresses were freed while they are mapped");
        }
        match fake.reserved.remove(&address) {
            Some(reserved) if reserved == bytes => Ok(()),
            _ => {
                fake.fault("addresses were freed that do not match a reservation");
                Err(result::INVALID_VALUE)
            }
        }
    }
    mem_map(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) |fake| {
        let memory = *fake.handles.get(&handle).ok_or(result::INVALID_VALUE)?;
        if fake.reserved.get(&address).is_none_or(|reserved| bytes > *reserved) {
            fake.fault("memory was mapped at addresses that are not reserved");
            return Err(result::INVALID_VALUE);
        }
        if offset != 0 || fake.bytes_of(memory) != bytes as u64 {
            return Err(result::INVALID_VALUE);
        }
        if fake.mapped.contains_key(&address) {
            return Err(ALREADY_MAPPED);
        }
        fake.mapped.insert(address, Mapping { memory, bytes, writable: false });
        Ok(())
    }
    mem_unmap(address: u64, bytes: usize) |fake| {
        if fake.has_work_on_device(address, bytes) {
            fake.fault("device memory was unmapped during a copy");
        }
        match fake.mapped.remove(&address) {
            Some(mapping) if mapping.bytes == bytes => {
                fake.forget(mapping.memory);
                Ok(())
            }
            _ => {
                fake.fault("device memory was unmapped that does not match a mapping");
                Err(result::INVALID_VALUE)
            }
        }
    }
    mem_set_access(address: u64, bytes: usize, access: *const MemAccessDesc, many: usize) |fake| {
        // SAFETY: the pointer is to a local of the caller.
        let access = unsafe { access.as_ref() }.ok_or(result::INVALID_VALUE)?;
        let fits = many == 1
            && access.location_type == LOCATION_DEVICE
            && access.location_id == 11
            && access.flags == ACCESS_READ_WRITE;
        match fake.mapped.get_mut(&address) {
            Some(mapping) if fits && mapping.bytes == bytes => {
                mapping.writable = true;
                Ok(())
            }
            _ => Err(result::INVALID_VALUE),
        }
    }
    mem_export(to: *mut i32, handle: u64, kind: u32, _flags: u64) |fake| {
        let memory = *fake.handles.get(&handle).ok_or(result::INVALID_VALUE)?;
        let of = fake.memories.get(&memory).ok_or(result::INVALID_VALUE)?;
        if of.imported || kind != POSIX_DESCRIPTOR {
            return Err(result::INVALID_VALUE);
        }
        if of.filled.contains(&false) {
            fake.fault("memory was exported before it was cleared of another process's content");
        }
        let file = fake.export(memory).map_err(|_| result::OUT_OF_MEMORY)?;
        give(to, file.into_raw_fd())
    }
    mem_import(to: *mut u64, number: *mut c_void, kind: u32) |fake| {
        let number = i32::try_from(number.addr()).map_err(|_| result::INVALID_VALUE)?;
        // SAFETY: the caller has this descriptor open.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let memory = identity(file).and_then(|file| fake.exported.get(&file).copied());
        let memory = memory.filter(|_| kind == POSIX_DESCRIPTOR).ok_or(result::INVALID_VALUE)?;
        let handle = fake.number();
        fake.handles.insert(handle, memory);
        give(to, handle)
    }
    host_register(start: *mut c_void, bytes: usize, _flags: u32) |fake| {
        let at = start.expose_provenance();
        let overlaps = fake.registered.range(..at + bytes).next_back();
        if overlaps.is_some_and(|(start, of)| start + of > at) {
            return Err(ALREADY_REGISTERED);
        }
        if bytes == 0 || !at.is_multiple_of(PAGE_BYTES) {
            return Err(result::INVALID_VALUE);
        }
        if resident(at, bytes) != Some(true) {
            fake.fault("pages were registered that do not exist, so the kernel would charge them \
                        to the copier");
        }
        fake.registered.insert(at, bytes);
        Ok(())
    }
    host_unregister(start: *mut c_void) |fake| {
        let at = start.addr();
        let bytes = *fake.registered.get(&at).ok_or(NOT_REGISTERED)?;
        if fake.has_work_on_host(at, bytes) {
            fake.fault("host memory was freed during a copy");
        }
        fake.registered.remove(&at);
        Ok(())
    }
    copy_in(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) |fake| {
        let host = from.expose_provenance();
        fake.begin(stream.addr(), Work::In { host, device: to, bytes })
    }
    copy_out(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) |fake| {
        let host = to.expose_provenance();
        fake.begin(stream.addr(), Work::Out { host, device: from, bytes })
    }
    stream_create(to: *mut *mut c_void, _flags: u32) |fake| {
        let number = fake.number() as usize;
        fake.streams.insert(number, VecDeque::new());
        give(to, std::ptr::without_provenance_mut(number))
    }
    event_create(to: *mut *mut c_void, _flags: u32) |fake| {
        let number = fake.number() as usize;
        fake.events.insert(number, Event::Idle);
        give(to, std::ptr::without_provenance_mut(number))
    }
    event_record(event: *mut c_void, stream: *mut c_void) |fake| {
        *fake.events.get_mut(&event.addr()).ok_or(INVALID_HANDLE)? = Event::Pending;
        fake.begin(stream.addr(), Work::Record { event: event.addr() })
    }
    event_query(event: *mut c_void) |fake| {
        match fake.events.get(&event.addr()).ok_or(INVALID_HANDLE)? {
            Event::Idle => Ok(()),
            Event::Pending => Err(result::NOT_READY),
            Event::Failed(code) => Err(*code),
        }
    }
    event_destroy(event: *mut c_void) |fake| {
        fake.events.remove(&event.addr()).map(drop).ok_or(INVALID_HANDLE)
    }
    stream_synchronize(stream: *mut c_void) |fake| {
        fake.run(stream.addr());
        if fake.sticky == 0 { Ok(()) } else { Err(fake.sticky) }
    }
    stream_destroy(stream: *mut c_void) |fake| {
        match fake.streams.remove(&stream.addr()) {
            Some(work) if work.is_empty() => Ok(()),
            Some(_) => {
                fake.fault("a stream was destroyed before its copies had ended");
                Ok(())
            }
            None => Err(INVALID_HANDLE),
        }
    }
}
