//! Caches results of driver calls that stay the same for the life of a process, such as the number
//! of devices and their names.
//!
//! A program can request these results at any time (`torch.cuda.device_count()`), and no such
//! request needs the GPU. While the process is offloaded, some of these calls fail in the driver
//! (`cuDeviceGetName` returns 304, H200, driver 580.159). The gate therefore returns the driver's
//! earlier result and does not forward the call. A call without an earlier result waits like any
//! other call.
//!
//! ```text
//! resident: driver ──success──> remember()    offloaded: answer() ──known──> caller
//!                                                           └──not──> gate
//! ```

use core::slice;
use core::sync::atomic::{AtomicU8, Ordering};

use affinode_cuda_sys::hook::Function;

use crate::hook_table::HookEntry;
use crate::libcuda::CachedFunction;

/// Number of devices that are cached, from ordinal 0 on.
const MAX_DEVICES: usize = 16;
/// Maximum size of a cached result.
const MAX_BYTES: usize = 256;
/// Functions whose results are cached.
const FUNCTIONS: [Function; 9] = [
    Function::cuDeviceGetCount,
    Function::cuDeviceGet,
    Function::cuDeviceGetName,
    Function::cuDeviceGetPCIBusId,
    Function::cuDeviceGetUuid,
    Function::cuDeviceGetUuid_v2,
    Function::cuDeviceTotalMem,
    Function::cuDeviceTotalMem_v2,
    Function::cuDeviceComputeCapability,
];

const EMPTY: u8 = 0;
const BUSY: u8 = 1;
const KNOWN: u8 = 2;

/// The cached result of one function for one device.
struct CachedConstant {
    state: AtomicU8,
    bytes: [AtomicU8; MAX_BYTES],
}

static CONSTANTS: [[CachedConstant; MAX_DEVICES]; FUNCTIONS.len()] = [const {
    [const {
        CachedConstant {
            state: AtomicU8::new(EMPTY),
            bytes: [const { AtomicU8::new(0) }; MAX_BYTES],
        }
    }; MAX_DEVICES]
}; FUNCTIONS.len()];

/// The addresses to which a call writes its results.
enum ConstantQuery {
    /// One or two addresses, each with the number of bytes to write there.
    Values([(u64, usize); 2]),
    /// The address of a text, and the size of its buffer with the terminating zero.
    Text(u64, usize),
}

/// Returns the function that a hook calls, if its results are cached. The name of the hook does not
/// show the version of `cuDeviceTotalMem`: `cuGetProcAddress` returns `cuDeviceTotalMem_v2` for the
/// name without a version. The two versions write results of different sizes.
fn function_of(entry: &HookEntry) -> Option<Function> {
    static OLD: CachedFunction = CachedFunction::new(b"cuDeviceTotalMem");
    static NEW: CachedFunction = CachedFunction::new(b"cuDeviceTotalMem_v2");
    let is = |function: &CachedFunction| function.address() == Some(entry.real());
    let named = |function: &&Function| **function as u32 + 1 == entry.number();
    match FUNCTIONS.iter().find(named)? {
        Function::cuDeviceTotalMem if is(&NEW) || !is(&OLD) => Some(Function::cuDeviceTotalMem_v2),
        function => Some(*function),
    }
}

/// Returns the cache entry of a call, and the addresses to which the call writes its results.
/// Returns `None` if results of this function are not cached.
fn question(
    entry: &HookEntry,
    arguments: &[u64; 6],
) -> Option<(&'static CachedConstant, ConstantQuery)> {
    let function = function_of(entry)?;
    let row = FUNCTIONS.iter().position(|known| *known == function)?;
    let [a, b, c, ..] = *arguments;
    let one = |bytes| ConstantQuery::Values([(a, bytes), (0, 0)]);
    let (device, wanted) = match function {
        Function::cuDeviceGetCount => (0, one(4)),
        Function::cuDeviceGetName | Function::cuDeviceGetPCIBusId => {
            (c, ConstantQuery::Text(a, usize::try_from(b as i32).ok()?))
        }
        Function::cuDeviceComputeCapability => (c, ConstantQuery::Values([(a, 4), (b, 4)])),
        Function::cuDeviceGetUuid | Function::cuDeviceGetUuid_v2 => (b, one(16)),
        Function::cuDeviceTotalMem_v2 => (b, one(8)),
        // These are cuDeviceGet, and cuDeviceTotalMem in its 32-bit version.
        _ => (b, one(4)),
    };
    let device = usize::try_from(device as i32).ok()?;
    let is_whole = match wanted {
        ConstantQuery::Values(places) => places.iter().all(|(at, bytes)| *at != 0 || *bytes == 0),
        ConstantQuery::Text(at, bytes) => at != 0 && bytes > 0,
    };
    let answer = CONSTANTS.get(row)?.get(device)?;
    is_whole.then_some((answer, wanted))
}

/// Stores the results of a driver call in the cache. `entry` is the function's hook.
///
/// # Safety
/// `arguments` must be those of a call of the function of `entry`. The call must have just
/// succeeded.
pub unsafe fn remember(entry: &HookEntry, arguments: &[u64; 6]) {
    let Some((answer, wanted)) = question(entry, arguments) else { return };
    let order = Ordering::Acquire;
    if answer.state.compare_exchange(EMPTY, BUSY, order, Ordering::Relaxed).is_err() {
        return;
    }
    let mut kept = answer.bytes.iter();
    let mut keep = |at: u64, bytes: usize| {
        // SAFETY: the driver has written this many bytes at this address.
        let said = unsafe { slice::from_raw_parts(at as *const u8, bytes) };
        said.iter().zip(&mut kept).for_each(|(byte, to)| to.store(*byte, Ordering::Relaxed));
    };
    let is_kept = match wanted {
        ConstantQuery::Values(places) => {
            let places = places.into_iter().filter(|(_, bytes)| *bytes > 0);
            places.for_each(|(at, bytes)| keep(at, bytes));
            true
        }
        ConstantQuery::Text(at, room) => {
            // SAFETY: the driver has written a text that ends within this buffer.
            let length = unsafe { length(at, room) };
            // A text that fills its buffer may have been cut off.
            let is_whole = length.is_some_and(|n| n + 1 < room && n < MAX_BYTES);
            if let Some(length) = length.filter(|_| is_whole) {
                keep(at, length + 1);
            }
            is_whole
        }
    };
    answer.state.store(if is_kept { KNOWN } else { EMPTY }, Ordering::Release);
}

/// Returns the length of a C string in bytes, without its terminating zero. Returns `None` if the
/// first `room` bytes contain no zero.
///
/// # Safety
/// All bytes from `at` up to the first zero, at most `room` of them, must be readable.
unsafe fn length(at: u64, room: usize) -> Option<usize> {
    // SAFETY: the caller guarantees the text, and nothing after its end is read.
    (0..room).find(|n| unsafe { (at as *const u8).add(*n).read() } == 0)
}

/// Writes the cached results of a driver call to the caller's addresses. `entry` is the function's
/// hook. Returns false if no result is cached, or the caller's buffer is too small.
///
/// # Safety
/// `arguments` must be those of a call of the function of `entry`.
pub unsafe fn answer(entry: &HookEntry, arguments: &[u64; 6]) -> bool {
    let Some((answer, wanted)) = question(entry, arguments) else { return false };
    if answer.state.load(Ordering::Acquire) != KNOWN {
        return false;
    }
    let mut known = answer.bytes.iter().map(|byte| byte.load(Ordering::Relaxed));
    let mut put = |at: u64, bytes: usize| {
        for (n, byte) in known.by_ref().take(bytes).enumerate() {
            // SAFETY: the caller has space for the result there.
            unsafe { (at as *mut u8).add(n).write(byte) };
        }
    };
    match wanted {
        ConstantQuery::Values(places) => places.into_iter().for_each(|(at, bytes)| put(at, bytes)),
        ConstantQuery::Text(at, room) => {
            let end = answer.bytes.iter().position(|byte| byte.load(Ordering::Relaxed) == 0);
            let Some(bytes) = end.map(|n| n + 1).filter(|bytes| *bytes <= room) else {
                return false;
            };
            put(at, bytes);
        }
    }
    true
}

/// Empties the cache. This is necessary after a restore on another GPU, because the process then
/// has other devices. Only called while no CUDA call is in progress.
pub fn forget() {
    CONSTANTS.iter().flatten().for_each(|answer| answer.state.store(EMPTY, Ordering::Release));
}

#[cfg(test)]
mod tests {
    use affinode_cuda_sys::hook::Class;

    use super::*;

    fn hook_of(function: Function) -> HookEntry {
        HookEntry::exported(function as u32 + 1, Class::Constant)
    }

    fn text(at: &mut [u8], device: u64) -> [u64; 6] {
        [at.as_mut_ptr() as u64, at.len() as u64, device, 0, 0, 0]
    }

    /// Tests that results are cached for each device. All cases are in one test, because all tests
    /// share the cache.
    #[test]
    fn answers_are_kept_and_given_by_device() {
        let name = &hook_of(Function::cuDeviceGetName);
        let mut said = *b"A GPU\0......";
        let (mut asked, mut cut) = ([0xff_u8; 8], [0_u8; 4]);
        // SAFETY: the buffers have these sizes, and each text ends inside its buffer.
        unsafe {
            assert!(!answer(name, &text(&mut asked, 1)), "never asked");
            // A text that fills its buffer may be incomplete.
            remember(name, &text(&mut said[..6], 1));
            assert!(!answer(name, &text(&mut asked, 1)));
            remember(name, &text(&mut said, 1));
            assert!(answer(name, &text(&mut asked, 1)));
            assert_eq!(&asked, b"A GPU\0\xff\xff", "no byte after the text is written");
            assert!(!answer(name, &text(&mut cut, 1)), "the buffer is too small for the text");
            assert!(
                !answer(name, &text(&mut asked, 0)),
                "the name of another device is not cached"
            );
            for device in [16, u64::from(u32::MAX)] {
                remember(name, &text(&mut said, device));
                assert!(!answer(name, &text(&mut asked, device)), "{device}");
            }
        }
        let capability = &hook_of(Function::cuDeviceComputeCapability);
        let (mut major, mut minor) = (9_i32, 7_i32);
        let arguments = [&raw mut major as u64, &raw mut minor as u64, 0, 0, 0, 0];
        // SAFETY: the arguments are the addresses of two integers.
        unsafe {
            remember(capability, &arguments);
            (major, minor) = (0, 0);
            assert!(answer(capability, &arguments));
            assert_eq!((major, minor), (9, 7));
            assert!(!answer(capability, &[0; 6]), "the addresses are null");
            assert!(
                !answer(&hook_of(Function::cuInit), &arguments),
                "the results of this function are not cached"
            );
            forget();
            assert!(!answer(capability, &arguments));
        }
    }
}
