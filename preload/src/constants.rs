//! Answers of the driver that do not change in the life of a process: how many devices there are, and
//! what each is called.
//!
//! A program asks for them at any time (`torch.cuda.device_count()`), and none of them needs the GPU.
//! While the process is away some reach the driver in vain (`cuDeviceGetName` returns 304, H200,
//! 580.159), so none does: the gate answers with what the driver answered before. What was never
//! asked before waits, as any call does.
//!
//! ```text
//! resident: driver ──success──> remember()          away: answer() ──known──> caller
//!                                                              └──not──> gate
//! ```

use core::slice;
use core::sync::atomic::{AtomicU8, Ordering};

use affinode_cuda_sys::hook::Function;

/// Devices from this ordinal on are not remembered.
const MAX_DEVICES: usize = 16;
/// The longest answer.
const MAX_BYTES: usize = 256;
/// Functions whose answers are remembered.
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

/// What a function has answered for a device.
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

/// Where a call wants its answer.
enum ConstantQuery {
    /// At one or two places, of so many bytes each.
    Values([(u64, usize); 2]),
    /// A text of at most so many bytes, its end included.
    Text(u64, usize),
}

/// The place of an answer, and where the caller wants it. `None`: it is not remembered.
fn question(number: u32, arguments: &[u64; 6]) -> Option<(&'static CachedConstant, ConstantQuery)> {
    let row = FUNCTIONS.iter().position(|function| *function as u32 + 1 == number)?;
    let [a, b, c, ..] = *arguments;
    let one = |bytes| ConstantQuery::Values([(a, bytes), (0, 0)]);
    let (device, wanted) = match FUNCTIONS.get(row)? {
        Function::cuDeviceGetCount => (0, one(4)),
        Function::cuDeviceGetName | Function::cuDeviceGetPCIBusId => {
            (c, ConstantQuery::Text(a, usize::try_from(b as i32).ok()?))
        }
        Function::cuDeviceComputeCapability => (c, ConstantQuery::Values([(a, 4), (b, 4)])),
        Function::cuDeviceGetUuid | Function::cuDeviceGetUuid_v2 => (b, one(16)),
        Function::cuDeviceTotalMem_v2 => (b, one(8)),
        // cuDeviceGet, and the size as it was in 32 bits.
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

/// Keeps what the driver has answered.
///
/// # Safety
/// `arguments` must be those of a call of this function that has just succeeded.
pub unsafe fn remember(number: u32, arguments: &[u64; 6]) {
    let Some((answer, wanted)) = question(number, arguments) else { return };
    let order = Ordering::Acquire;
    if answer.state.compare_exchange(EMPTY, BUSY, order, Ordering::Relaxed).is_err() {
        return;
    }
    let mut kept = answer.bytes.iter();
    let mut keep = |at: u64, bytes: usize| {
        // SAFETY: the driver has written so many bytes there.
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
            // SAFETY: the driver has written a text that ends in this room.
            let length = unsafe { length(at, room) };
            // One that fills the room may have been cut off.
            let is_whole = length.is_some_and(|n| n + 1 < room && n < MAX_BYTES);
            if let Some(length) = length.filter(|_| is_whole) {
                keep(at, length + 1);
            }
            is_whole
        }
    };
    answer.state.store(if is_kept { KNOWN } else { EMPTY }, Ordering::Release);
}

/// The length of a text without its end, if it ends in its room.
///
/// # Safety
/// `at` must point to a text that ends, or to so many bytes.
unsafe fn length(at: u64, room: usize) -> Option<usize> {
    // SAFETY: as the function demands; what is behind the end is not read.
    (0..room).find(|n| unsafe { (at as *const u8).add(*n).read() } == 0)
}

/// Answers a call from what is known. False: it is not.
///
/// # Safety
/// `arguments` must be those of a call of this function.
pub unsafe fn answer(number: u32, arguments: &[u64; 6]) -> bool {
    let Some((answer, wanted)) = question(number, arguments) else { return false };
    if answer.state.load(Ordering::Acquire) != KNOWN {
        return false;
    }
    let mut known = answer.bytes.iter().map(|byte| byte.load(Ordering::Relaxed));
    let mut put = |at: u64, bytes: usize| {
        for (n, byte) in known.by_ref().take(bytes).enumerate() {
            // SAFETY: the caller has room for the answer there.
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

/// Forgets all: the devices are others from now on. Only while no call is in progress.
pub fn forget() {
    CONSTANTS.iter().flatten().for_each(|answer| answer.state.store(EMPTY, Ordering::Release));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(function: Function) -> u32 {
        function as u32 + 1
    }

    fn text(at: &mut [u8], device: u64) -> [u64; 6] {
        [at.as_mut_ptr() as u64, at.len() as u64, device, 0, 0, 0]
    }

    /// One test, because what is known is known to all.
    #[test]
    fn answers_are_kept_and_given_by_device() {
        let name = number(Function::cuDeviceGetName);
        let mut said = *b"A GPU\0......";
        let (mut asked, mut cut) = ([0xff_u8; 8], [0_u8; 4]);
        // SAFETY: rooms of these sizes, and texts that end in them.
        unsafe {
            assert!(!answer(name, &text(&mut asked, 1)), "never asked");
            // What fills its room may be a part.
            remember(name, &text(&mut said[..6], 1));
            assert!(!answer(name, &text(&mut asked, 1)));
            remember(name, &text(&mut said, 1));
            assert!(answer(name, &text(&mut asked, 1)));
            assert_eq!(&asked, b"A GPU\0\xff\xff", "and nothing behind it");
            assert!(!answer(name, &text(&mut cut, 1)), "no room for all of it");
            assert!(!answer(name, &text(&mut asked, 0)), "of another device");
            for device in [16, u64::from(u32::MAX)] {
                remember(name, &text(&mut said, device));
                assert!(!answer(name, &text(&mut asked, device)), "{device}");
            }
        }
        let capability = number(Function::cuDeviceComputeCapability);
        let (mut major, mut minor) = (9_i32, 7_i32);
        let arguments = [&raw mut major as u64, &raw mut minor as u64, 0, 0, 0, 0];
        // SAFETY: two integers.
        unsafe {
            remember(capability, &arguments);
            (major, minor) = (0, 0);
            assert!(answer(capability, &arguments));
            assert_eq!((major, minor), (9, 7));
            assert!(!answer(capability, &[0; 6]), "nowhere to put it");
            assert!(!answer(number(Function::cuInit), &arguments), "not such a function");
            forget();
            assert!(!answer(capability, &arguments));
        }
    }
}
