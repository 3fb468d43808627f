//! Memory of other processes that this process has opened by legacy IPC handles.

use affinode_cuda_sys::hook::Function;
use affinode_cuda_sys::{MemAllocationProp, POSIX_DESCRIPTOR, result};
use affinode_proto::wire::ipc::{HANDLE_BYTES, IpcHandle, IpcReply, IpcRequest};
use affinode_proto::wire::message::FRAME_BYTES;

use super::super::alloc_wrappers::release;
use super::super::allocations::{Allocation, AllocationPiece};
use super::super::backing::give_access_to_opened;
use super::super::chunked_map::{ChunkedMap, HasKey};
use super::super::contexts::{current_context, wait_for_work};
use super::super::driver::call;
use super::super::{GRANULE_BYTES, addresses, find_all, locked, tables};
use crate::libcuda;
use crate::sys::{self, Descriptor, datagram, task};

/// Time limit in microseconds for the reply of an exporter, the process that shares its memory. The
/// limit is long, because an exporter that is copying its other memory replies only after the copy.
/// If the exporter ends, this process notices it at once.
const WITHIN_US: u64 = 60_000_000;

/// One allocation of another process that this process has opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportedHandle {
    /// The mapping of the allocation in this process. Offloads leave it on the device, because the
    /// memory belongs to another process.
    pub allocation: Allocation,
    handle: IpcHandle,
    times: u32,
}

impl HasKey for ImportedHandle {
    fn key(&self) -> u64 {
        self.allocation.piece.address
    }
}

/// Allocations of other processes that this process has open, by address.
pub type OpenedOnes = ChunkedMap<ImportedHandle>;

impl OpenedOnes {
    /// The opened allocation that contains an address.
    pub fn around(&mut self, address: u64) -> Option<&mut ImportedHandle> {
        let inside = |opened: &&mut ImportedHandle| {
            let piece = &opened.allocation.piece;
            address.wrapping_sub(piece.address) < piece.bytes
        };
        self.up_to(address).filter(inside)
    }

    /// Opens memory once more that is already open in this context: counts the open, and returns
    /// the address. `None`: the memory is not open in this context.
    fn again(&mut self, handle: &IpcHandle, context: usize) -> Option<u64> {
        let same = |opened: &&mut ImportedHandle| {
            opened.handle == *handle && opened.allocation.piece.context == context
        };
        let known = self.iter_mut().find(same)?;
        known.times += 1;
        Some(known.allocation.piece.address)
    }

    /// Closes the memory at an address once. `None`: no memory is open there. If this was the last
    /// close, the inner value is the piece that the caller must release.
    fn let_go(&mut self, address: u64) -> Option<Option<AllocationPiece>> {
        let known = self.at(address)?;
        known.times -= 1;
        if known.times > 0 {
            return Some(None);
        }
        self.remove_at(address).map(|opened| Some(opened.allocation.piece))
    }
}

/// An IPC handle of 64 bytes, which is passed by value on the stack as in C.
#[repr(C)]
pub struct ByValue([u8; HANDLE_BYTES]);

/// Returns this library's wrapper of a driver function that opens IPC handles. `None`: the function
/// opens no handles. The wrapper is needed even if no memory of this process is swappable, because
/// only the bytes of a handle show whether this library has made it.
pub fn opening(number: u32, real: usize) -> Option<usize> {
    let is = |function: Function| number == function as u32 + 1;
    if !is(Function::cuIpcOpenMemHandle_v2) && !is(Function::cuIpcOpenMemHandle) {
        return None;
    }
    // The name does not show the version: `cuGetProcAddress` returns the new function for the old
    // name.
    let is_new = libcuda::function(b"cuIpcOpenMemHandle_v2") == Some(real);
    Some(if is_new {
        ipc_open_mem_handle_v2 as *const () as usize
    } else {
        ipc_open_mem_handle as *const () as usize
    })
}

pub unsafe extern "C" fn ipc_open_mem_handle_v2(at: *mut u64, handle: ByValue, flags: u32) -> u32 {
    match IpcHandle::decode(&handle.0) {
        // SAFETY: the application's own arguments.
        Some(handle) => unsafe { open(at, &handle, flags) },
        None => call!(ipc_open_mem_handle_v2(at, handle, flags)),
    }
}

pub unsafe extern "C" fn ipc_open_mem_handle(at: *mut u64, handle: ByValue, flags: u32) -> u32 {
    match IpcHandle::decode(&handle.0) {
        // SAFETY: the application's own arguments.
        Some(handle) => unsafe { open(at, &handle, flags) },
        None => call!(ipc_open_mem_handle(at, handle, flags)),
    }
}

/// Opens a handle and writes the address of the memory to `at`. Returns the driver's code.
///
/// # Safety
/// `at` must be null or a place for an address.
unsafe fn open(at: *mut u64, handle: &IpcHandle, flags: u32) -> u32 {
    const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
    if at.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
        return result::INVALID_VALUE;
    }
    if !find_all() {
        return result::NOT_SUPPORTED;
    }
    let Some(context) = current_context().filter(|context| *context != 0) else {
        return result::INVALID_CONTEXT;
    };
    if tables(|tables| tables.identity).made(handle) {
        return result::INVALID_CONTEXT;
    }
    let address = match tables(|tables| tables.opened.again(handle, context)) {
        Some(known) => known,
        None => match import(handle, context).and_then(|opened| keep(&opened)) {
            Ok(address) => address,
            Err(code) => return code,
        },
    };
    // SAFETY: not null, and so the application's own place for the address.
    unsafe { at.write(address) };
    result::SUCCESS
}

/// Records opened memory and returns its address. If another thread has opened the same memory
/// meanwhile, releases the new mapping and returns the address of that thread's mapping.
fn keep(opened: &ImportedHandle) -> Result<u64, u32> {
    let piece = opened.allocation.piece;
    let (known, noted) = tables(|tables| {
        let known = tables.opened.again(&opened.handle, piece.context);
        let mut opened = *opened;
        opened.allocation.piece.since = tables.now();
        (known, known.is_none() && tables.opened.insert(opened))
    });
    if noted {
        return Ok(piece.address);
    }
    release(&piece);
    known.ok_or(result::OUT_OF_MEMORY)
}

fn done(code: u32) -> Result<(), u32> {
    if code == result::SUCCESS { Ok(()) } else { Err(code) }
}

/// Requests the memory of a handle from the process that shares it, and maps the memory for the
/// device of the current context.
fn import(handle: &IpcHandle, context: usize) -> Result<ImportedHandle, u32> {
    let mut device = -1;
    done(call!(ctx_get_device(&raw mut device)))?;
    let (answer, shared) = ask(handle).ok_or(result::INVALID_VALUE)?;
    let number = usize::try_from(shared.number()).map_err(|_| result::INVALID_VALUE)?;
    let mut memory = 0;
    done(call!(mem_import(&raw mut memory, number, POSIX_DESCRIPTOR)))?;
    let property = MemAllocationProp { location_id: device, ..MemAllocationProp::default() };
    let mut piece = AllocationPiece {
        bytes: answer.bytes,
        property,
        context,
        stays: true,
        ..AllocationPiece::default()
    };
    piece.handle = memory;
    let piece = map_anywhere(piece).inspect_err(|_| {
        call!(mem_release(memory));
    })?;
    done(give_access_to_opened(&piece)).inspect_err(|_| release(&piece))?;
    let allocation = Allocation { piece, asked_bytes: answer.asked_bytes, ..Allocation::default() };
    Ok(ImportedHandle { allocation, handle: *handle, times: 1 })
}

fn map_anywhere(piece: AllocationPiece) -> Result<AllocationPiece, u32> {
    let bytes = piece.bytes as usize;
    let address = addresses::reserve(bytes).ok_or(result::OUT_OF_MEMORY)?;
    done(call!(mem_map(address, bytes, 0, piece.handle, 0)))
        .inspect_err(|_| addresses::free(address, piece.bytes))?;
    Ok(AllocationPiece { address, ..piece })
}

/// Requests the memory of a handle from the exporter, the process that shares it. Returns the reply
/// and the descriptor of the memory. `None`: no valid reply has arrived in time.
fn ask(handle: &IpcHandle) -> Option<(IpcReply, Descriptor)> {
    let IpcHandle { word, address, since, .. } = *handle;
    let question = IpcRequest { word, address, since }.encode();
    let until_us = sys::now_us() + WITHIN_US;
    let left_us = || until_us.saturating_sub(sys::now_us());
    let [own, theirs] = datagram::pair().ok()?;
    let exporter = datagram::connect(&handle.socket_name()).ok()?;
    while let Err(error) = sys::send(exporter.number(), &question, Some(theirs.number())) {
        // Pause between two attempts to send while the socket is full of other requests.
        const PAUSE_US: u64 = 500;
        if ![sys::EAGAIN, sys::EINTR].contains(&error) || left_us() == 0 {
            return None;
        }
        sys::sleep_us(PAUSE_US);
    }
    // From here on only the exporter has the other end of the socket, so this process sees the
    // exporter's end.
    drop(theirs);
    if !task::wait_readable(own.number(), left_us().div_ceil(1_000)) {
        return None;
    }
    let mut frame = [0; FRAME_BYTES];
    let (length, shared) = sys::receive(own.number(), &mut frame).ok()?;
    let answer = IpcReply::decode(&frame).ok().filter(|_| length == frame.len())?;
    let fits = answer.bytes > 0
        && answer.bytes.is_multiple_of(GRANULE_BYTES as u64)
        && answer.asked_bytes <= answer.bytes
        && answer.proof == handle.proof;
    shared.filter(|_| fits).map(|shared| (answer, shared))
}

pub unsafe extern "C" fn ipc_close_mem_handle(address: u64) -> u32 {
    let Some(found) = tables(|tables| tables.opened.around(address).copied()) else {
        if locked(|table| table.around(address).is_some()) {
            return result::INVALID_VALUE;
        }
        return call!(ipc_close_mem_handle(address));
    };
    let piece = found.allocation.piece;
    if piece.address != address {
        return result::INVALID_VALUE;
    }
    match wait_for_work(piece.context) {
        result::SUCCESS => {}
        code => return code,
    }
    match tables(|tables| tables.opened.let_go(address)) {
        Some(last) => {
            if let Some(piece) = last {
                release(&piece);
            }
            result::SUCCESS
        }
        // Another thread has closed the memory meanwhile.
        None => result::INVALID_VALUE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(n: u64, context: usize) -> ImportedHandle {
        let piece = AllocationPiece {
            address: n * 100,
            bytes: 60,
            context,
            stays: true,
            ..AllocationPiece::default()
        };
        let handle = IpcHandle { address: n, ..IpcHandle::default() };
        let allocation = Allocation { piece, asked_bytes: 50, ..Allocation::default() };
        ImportedHandle { allocation, handle, times: 1 }
    }

    #[test]
    fn handle_opened_twice_is_closed_twice() {
        let mut table = OpenedOnes::empty();
        assert!(table.insert(opened(1, 7)) && table.insert(opened(2, 7)));
        let handle = opened(1, 7).handle;
        assert_eq!(table.again(&handle, 7), Some(100));
        assert_eq!(table.again(&handle, 8), None, "another context");
        assert_eq!(table.again(&IpcHandle { since: 1, ..handle }, 7), None, "another allocation");
        assert_eq!(table.let_go(100), Some(None));
        assert_eq!(table.around(159).map(|o| o.times), Some(1));
        assert_eq!(table.let_go(100), Some(Some(opened(1, 7).allocation.piece)));
        assert_eq!(table.let_go(100), None);
        assert!(table.around(100).is_none() && table.around(200).is_some());
        assert!(table.around(260).is_none());
    }

    /// Starts a server on the handle's socket that sends the reply of `make`. Returns the reply
    /// that the importer accepts.
    fn answered(make: impl Fn(&IpcHandle) -> IpcReply, with_memory: bool) -> Option<IpcReply> {
        let mut socket = [0; 16];
        datagram::random(&mut socket).unwrap();
        let handle = IpcHandle { socket, word: [3; 16], proof: 77, address: 1 << 40, since: 5 };
        let server =
            datagram::bind(&handle.socket_name(), None, sys::gettid(), sys::SIGURG).unwrap();
        let answer = make(&handle).encode();
        let thread = std::thread::spawn(move || {
            assert!(task::wait_readable(server.number(), 60_000));
            let mut frame = [0; FRAME_BYTES];
            let (length, way) = sys::receive(server.number(), &mut frame).unwrap();
            let asked = IpcRequest { word: [3; 16], address: 1 << 40, since: 5 };
            assert_eq!((length, IpcRequest::decode(&frame)), (FRAME_BYTES, Ok(asked)));
            let memory = with_memory.then(|| server.number());
            sys::send(way.unwrap().number(), &answer, memory).unwrap();
        });
        let answer = ask(&handle).map(|(answer, _)| answer);
        thread.join().unwrap();
        answer
    }

    #[test]
    fn only_the_maker_of_a_handle_is_believed() {
        const UNIT: u64 = GRANULE_BYTES as u64;
        let good =
            |handle: &IpcHandle| IpcReply { proof: handle.proof, bytes: UNIT, asked_bytes: 9 };
        assert_eq!(answered(good, true).map(|answer| answer.bytes), Some(UNIT));
        assert_eq!(answered(good, false), None, "the reply has no memory");
        assert_eq!(
            answered(|h| IpcReply { proof: 78, ..good(h) }, true),
            None,
            "the sender knows only the name of the socket"
        );
        for bytes in [0, UNIT + 1, UNIT / 2] {
            assert_eq!(answered(|h| IpcReply { bytes, ..good(h) }, true), None, "{bytes}");
        }
        assert_eq!(answered(|h| IpcReply { asked_bytes: UNIT + 1, ..good(h) }, true), None);
        assert_eq!(ask(&IpcHandle::default()).map(|(answer, _)| answer), None, "no such socket");
    }

    /// A handle must be passed as C passes it and as the thunk forwards it: integers in registers,
    /// and the 64 bytes of the handle as eight words on the stack.
    #[test]
    fn a_handle_is_passed_as_c_passes_it() {
        type InWords =
            unsafe extern "C" fn(*mut u64, u32, u64, u64, u64, u64, W, W, W, W, W, W, W, W) -> u32;
        type W = u64;
        unsafe extern "C" fn seen(at: *mut u64, handle: ByValue, flags: u32) -> u32 {
            let ends = [handle.0[0], handle.0[63]].map(u64::from);
            // SAFETY: the address is that of a local variable.
            unsafe { at.write(ends[0] << 8 | ends[1]) };
            flags
        }
        let same_signature: unsafe extern "C" fn(*mut u64, ByValue, u32) -> u32 = seen;
        let _ = [same_signature, ipc_open_mem_handle_v2, ipc_open_mem_handle];
        let mut at = 0;
        // SAFETY: the same call, as the ABI of this machine lays it out.
        let flags = unsafe {
            let seen: InWords = core::mem::transmute(seen as *const ());
            seen(&raw mut at, 5, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 9 << 56)
        };
        assert_eq!((at, flags), (3 << 8 | 9, 5));
    }
}
