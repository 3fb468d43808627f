//! Answers calls of NVML functions while NVML must not be called, from the cache or from figures
//! that the controller has sent.

use core::ffi::{CStr, c_char};

use affinode_cuda_sys::nvml::{Class, UUID};
use affinode_proto::paths::VRAM_FILE;
use affinode_proto::wire::message::{GpuReading, UNKNOWN_UTILIZATION};
use affinode_proto::wire::vram_view::{FILE_BYTES, VramView};

use super::cache::{self, AnswerKey, BYTES};
use super::thunk::NvmlFrame;
use super::{code, functions, readings};
use crate::agent::connection;
use crate::process::{self, PROCESS};
use crate::sys;

/// Maximum age, in microseconds, of a figure that is returned while the process is being moved.
pub const OLD_US: u64 = 60_000_000;

/// Where an NVML function writes its result. The numbers in the variants are argument numbers, from
/// 0 on.
#[derive(Clone, Copy)]
enum AnswerShape {
    /// The function writes the result to the address that one of its arguments contains. First
    /// value: number of that argument. Second value: number of bytes.
    Bytes(usize, usize),
    /// The result is a text. The argument with this number is the address of the buffer for the
    /// text, and the next argument is the buffer's length.
    Text(usize),
    /// The results are two u32 values. The argument with this number is the address of the first
    /// value, and the next argument is the address of the second value.
    Pair(usize),
}

/// Describes the arguments of an NVML function: which arguments identify the cached result, and
/// which argument is the address of the result. A string argument is always a part of the identity,
/// and is not listed here.
#[derive(Clone, Copy)]
struct AnswerLayout {
    /// Number of leading arguments that identify the result. Two calls have the same result only if
    /// they are equal in these arguments.
    numbers: usize,
    /// Number of bytes at the start of the result's structure that the caller fills in before the
    /// call, such as its version. They also identify the result.
    filled_bytes: usize,
    output: AnswerShape,
}

fn shape(class: Class) -> Option<AnswerLayout> {
    let (numbers, filled_bytes, output) = match class {
        Class::Word => (0, 0, AnswerShape::Bytes(0, 4)),
        Class::Text => (0, 0, AnswerShape::Text(0)),
        Class::Handle => (1, 0, AnswerShape::Bytes(1, 8)),
        Class::HandleByText => (0, 0, AnswerShape::Bytes(1, 8)),
        Class::DeviceText => (1, 0, AnswerShape::Text(1)),
        Class::DeviceWord | Class::Power => (1, 0, AnswerShape::Bytes(1, 4)),
        Class::DeviceLong | Class::Utilization => (1, 0, AnswerShape::Bytes(1, 8)),
        Class::DevicePair => (1, 0, AnswerShape::Pair(1)),
        Class::DeviceKindWord | Class::Temperature => (2, 0, AnswerShape::Bytes(2, 4)),
        Class::DevicePci => (1, 0, AnswerShape::Bytes(1, 68)),
        Class::Memory => (1, 0, AnswerShape::Bytes(1, 24)),
        Class::MemoryV2 => (1, 4, AnswerShape::Bytes(1, 40)),
        Class::TemperatureV => (1, 8, AnswerShape::Bytes(1, 12)),
        Class::Pass
        | Class::Init
        | Class::Shutdown
        | Class::Processes
        | Class::Wait
        | Class::Held => return None,
    };
    Some(AnswerLayout { numbers, filled_bytes, output })
}

impl AnswerLayout {
    /// Returns the address of the result, and the next argument: for a text the length of its
    /// buffer, for a pair the second address. Returns `None` if one of the two is 0.
    fn addresses(self, arguments: &[u64; 6]) -> Option<(u64, u64)> {
        let at = |number: usize| arguments.get(number).copied().unwrap_or(0);
        let (first, second) = match self.output {
            AnswerShape::Bytes(number, _) => (at(number), u64::MAX),
            AnswerShape::Text(number) | AnswerShape::Pair(number) => (at(number), at(number + 1)),
        };
        (first != 0 && second != 0).then_some((first, second))
    }
}

/// Returns the cache key for the UUID of the device that a handle refers to.
pub fn uuid_key(handle: u64) -> u64 {
    cache::key(UUID, &[handle], &[])
}

/// Returns the key under which the result of a call is cached. Returns `None` if the result is not
/// cached.
///
/// # Safety
/// `arguments` must be those of a call of a function of this shape, and its addresses must be
/// valid.
unsafe fn key(place: u64, class: Class, shape: AnswerLayout, arguments: &[u64; 6]) -> Option<u64> {
    const MAX_TEXT: usize = 128;
    let index = functions::index(place)?;
    let numbers = arguments.get(..shape.numbers)?;
    if class == Class::HandleByText {
        let [text, ..] = *arguments;
        if text == 0 {
            return None;
        }
        // SAFETY: the function takes a C string there.
        let text = unsafe { CStr::from_ptr(text as *const c_char) }.to_bytes();
        return (text.len() <= MAX_TEXT).then(|| cache::key(index, numbers, text));
    }
    let (at, _) = shape.addresses(arguments)?;
    // SAFETY: the caller has a structure there that begins with the bytes that it has filled in.
    let filled = unsafe { core::slice::from_raw_parts(at as *const u8, shape.filled_bytes) };
    // For 32-bit arguments the upper half of the register is undefined.
    Some(match *numbers {
        [number] if class == Class::Handle => cache::key(index, &[number & 0xffff_ffff], filled),
        [device, kind] => cache::key(index, &[device, kind & 0xffff_ffff], filled),
        _ => cache::key(index, numbers, filled),
    })
}

/// Caches the result of a call that has reached NVML.
///
/// # Safety
/// `frame` must be of a call of a function of this class that has returned.
pub unsafe fn remember(place: u64, class: Class, frame: &NvmlFrame) {
    let result = frame.result as u32;
    let lasts = [code::SUCCESS, code::NOT_SUPPORTED, code::NO_PERMISSION, code::NOT_FOUND];
    let Some(shape) = shape(class).filter(|_| lasts.contains(&result)) else { return };
    let Some((first, second)) = shape.addresses(&frame.arguments) else { return };
    // SAFETY: the caller guarantees the frame, and `addresses` has found that no address is 0.
    let Some(key) = (unsafe { key(place, class, shape, &frame.arguments) }) else { return };
    let mut bytes = [0; BYTES];
    if result == code::SUCCESS {
        // SAFETY: NVML has written all of it, with success.
        unsafe {
            match shape.output {
                AnswerShape::Bytes(_, count) => copy(&mut bytes, first, count),
                AnswerShape::Pair(_) => {
                    let (low, high) = bytes.split_at_mut(4);
                    copy(low, first, 4);
                    copy(high, second, 4);
                }
                AnswerShape::Text(_) => {
                    let text = CStr::from_ptr(first as *const c_char).to_bytes_with_nul();
                    if text.len() > BYTES {
                        return;
                    }
                    copy(&mut bytes, first, text.len());
                }
            }
        }
    }
    cache::store(key, result, &bytes);
}

/// Copies bytes from an address.
///
/// # Safety
/// There must be `count` bytes at `from`.
unsafe fn copy(to: &mut [u8], from: u64, count: usize) {
    // SAFETY: the caller guarantees this: see `# Safety` above.
    let from = unsafe { core::slice::from_raw_parts(from as *const u8, count) };
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from;
    }
}

/// Answers a call that must not reach NVML, and returns its result code. Returns `None` if no
/// result is known, so that the call must wait.
///
/// # Safety
/// `frame` must be of a call of a function of this class.
pub unsafe fn answer(
    place: u64,
    class: Class,
    frame: &NvmlFrame,
    is_checkpointed: bool,
) -> Option<u32> {
    if class == Class::Processes {
        // SAFETY: the caller guarantees this: see `# Safety` above.
        return unsafe { no_processes(frame) };
    }
    let shape = shape(class)?;
    let Some((first, second)) = shape.addresses(&frame.arguments) else {
        return Some(code::INVALID_ARGUMENT);
    };
    // SAFETY: the caller guarantees the frame, and `addresses` has found that no address is 0.
    let known = cache::find(unsafe { key(place, class, shape, &frame.arguments) }?);
    let is_figure = matches!(
        class,
        Class::Memory
            | Class::MemoryV2
            | Class::Utilization
            | Class::Temperature
            | Class::TemperatureV
            | Class::Power
    );
    if is_figure {
        if let Some(known) = known.filter(|known| known.result != code::SUCCESS) {
            return Some(known.result);
        }
        let [device, ..] = frame.arguments;
        if let Some(reading) = readings::fresh(&uuid(device)?, is_checkpointed) {
            // SAFETY: the caller guarantees the frame, and no address is 0.
            return unsafe { give_reading(class, &frame.arguments, first, &reading) };
        }
        let is_young = |known: &AnswerKey| sys::now_us().saturating_sub(known.at_us) <= OLD_US;
        // SAFETY: the caller guarantees the frame, and no address is 0.
        return known
            .filter(|known| !is_checkpointed && is_young(known))
            .map(|known| unsafe { give(shape, first, second, &known) });
    }
    // SAFETY: the caller guarantees the frame, and no address is 0.
    known.map(|known| unsafe { give(shape, first, second, &known) })
}

/// Writes a cached result to the caller's addresses, as the NVML function would.
///
/// # Safety
/// The addresses must be those of a call of a function of this shape.
unsafe fn give(shape: AnswerLayout, first: u64, second: u64, known: &AnswerKey) -> u32 {
    if known.result != code::SUCCESS {
        return known.result;
    }
    let write = |to: u64, bytes: &[u8]| {
        for (offset, byte) in bytes.iter().enumerate() {
            // SAFETY: the caller has room there for as much.
            unsafe { (to as *mut u8).add(offset).write(*byte) };
        }
    };
    match shape.output {
        AnswerShape::Bytes(_, count) => write(first, known.bytes.get(..count).unwrap_or_default()),
        AnswerShape::Pair(_) => {
            write(first, known.bytes.get(..4).unwrap_or_default());
            write(second, known.bytes.get(4..8).unwrap_or_default());
        }
        AnswerShape::Text(_) => {
            // For a text, the second value is the buffer's length.
            let text = CStr::from_bytes_until_nul(&known.bytes).unwrap_or_default();
            let text = text.to_bytes_with_nul();
            if (second as u32 as usize) < text.len() {
                return code::INSUFFICIENT_SIZE;
            }
            write(first, text);
        }
    }
    known.result
}

/// Reads the limit of the container's VRAM on a GPU from the file that the controller writes for
/// programs without CUDA. Returns the limit and the part of it that is not used yet, both in bytes.
/// `None`: the file has no limit for this GPU.
fn shown_in_file(uuid: &[u8; 16]) -> Option<(u64, u64)> {
    let (mut path, mut content) = ([0; connection::PATH_BYTES], [0; FILE_BYTES]);
    let path = connection::file_beside(connection::named_socket(), VRAM_FILE, &mut path)?;
    let view = VramView::find(sys::read_file(path, &mut content)?, uuid)?;
    Some((view.limit_bytes, view.limit_bytes.saturating_sub(view.used_bytes)))
}

/// Reduces a device's memory sizes in the result of a call to the limit of the container's VRAM, if
/// there is one. If `asks` is true, requests from the controller how much VRAM the limit leaves.
/// Otherwise uses the controller's last reply.
///
/// # Safety
/// `frame` must be of a call of a function of this class that has returned success.
pub unsafe fn limit(class: Class, frame: &NvmlFrame, asks: bool) {
    let [device, at, ..] = frame.arguments;
    let first = match class {
        Class::Memory => 0,
        Class::MemoryV2 => 1,
        _ => return,
    };
    let limit = &PROCESS.vram_limit;
    let view = |uuid| match process::page() {
        None => shown_in_file(&uuid),
        Some(_) if asks => limit.fresh_view(&uuid),
        Some(_) => limit.view(&uuid),
    };
    let Some((limit_bytes, left_bytes)) = uuid(device).and_then(view) else { return };
    // SAFETY: the function has written its structure there: total, free and used, after a version
    // in the second form, which also has reserved memory after the total.
    unsafe {
        let word = |index: usize| (at as *mut u64).add(index);
        let total = word(first).read_unaligned().min(limit_bytes);
        let free_at = if class == Class::Memory { first + 1 } else { first + 2 };
        let free = word(free_at).read_unaligned().min(left_bytes).min(total);
        word(first).write_unaligned(total);
        word(free_at).write_unaligned(free);
        word(free_at + 1).write_unaligned(total.saturating_sub(left_bytes));
        if class == Class::MemoryV2 {
            // What the driver reserves on the device is not the container's.
            word(first + 1).write_unaligned(0);
        }
    }
}

/// Writes a reading of the controller to the address `at`, in the form in which the called function
/// returns its result.
///
/// # Safety
/// `at` must be the address of the result in a call of a function of this class.
unsafe fn give_reading(
    class: Class,
    arguments: &[u64; 6],
    at: u64,
    reading: &GpuReading,
) -> Option<u32> {
    const MEMORY_V2: u32 = 40 | 2 << 24;
    const TEMPERATURE_V1: u32 = 12 | 1 << 24;
    let used = reading.total_bytes.saturating_sub(reading.free_bytes);
    let [_, kind, ..] = *arguments;
    let known = |value: u32| (value != UNKNOWN_UTILIZATION).then_some(value);
    // SAFETY: the caller has a structure there whose version gives its size; and
    // space for as much as the function writes.
    unsafe {
        let words = at as *mut u32;
        let long = |index: usize, value: u64| (at as *mut u64).add(index).write_unaligned(value);
        let word = |index: usize, value: u32| words.add(index).write_unaligned(value);
        match class {
            Class::Memory => {
                long(0, reading.total_bytes);
                long(1, reading.free_bytes);
                long(2, used);
            }
            Class::MemoryV2 if words.read_unaligned() != MEMORY_V2 => {
                return Some(code::ARGUMENT_VERSION_MISMATCH);
            }
            Class::MemoryV2 => {
                long(1, reading.total_bytes);
                long(2, reading.reserved_bytes);
                long(3, reading.free_bytes);
                long(4, used.saturating_sub(reading.reserved_bytes));
            }
            Class::Utilization => {
                let rates = (known(reading.gpu_percent)?, known(reading.memory_percent)?);
                word(0, rates.0);
                word(1, rates.1);
            }
            Class::Temperature if kind as u32 == 0 => word(0, known(reading.temperature_c)?),
            Class::TemperatureV
                if words.read_unaligned() == TEMPERATURE_V1
                    && words.add(1).read_unaligned() == 0 =>
            {
                word(2, known(reading.temperature_c)?);
            }
            Class::Power => word(0, known(reading.power_mw)?),
            // A reading does not contain another sensor, nor the data for another version of the
            // structure.
            _ => return None,
        }
    }
    Some(code::SUCCESS)
}

/// Returns the cached UUID of the device that a handle refers to.
fn uuid(handle: u64) -> Option<[u8; 16]> {
    let known = cache::find(uuid_key(handle)).filter(|known| known.result == code::SUCCESS)?;
    parse_uuid(CStr::from_bytes_until_nul(&known.bytes).ok()?.to_bytes())
}

/// Parses a UUID such as `GPU-8f3c…`. Returns `None` for MIG devices, because their names have
/// another form.
pub fn parse_uuid(text: &[u8]) -> Option<[u8; 16]> {
    let mut digits = text.strip_prefix(b"GPU-")?.iter().filter(|byte| **byte != b'-');
    let mut uuid = [0; 16];
    for byte in &mut uuid {
        let mut digit = || char::from(*digits.next()?).to_digit(16);
        *byte = (digit()? << 4 | digit()?) as u8;
    }
    digits.next().is_none().then_some(uuid)
}

/// Answers a query of a device's processes with an empty list. While NVML must not be called, the
/// container's own processes are not on the device. Processes of other containers are not visible.
/// `None`: the UUID of the device is not cached.
///
/// # Safety
/// `frame` must be of a call of a function with the arguments (device, count, processes).
unsafe fn no_processes(frame: &NvmlFrame) -> Option<u32> {
    let [device, count, ..] = frame.arguments;
    uuid(device)?;
    if count == 0 {
        return Some(code::INVALID_ARGUMENT);
    }
    // SAFETY: the caller has a u32 there.
    unsafe { (count as *mut u32).write_unaligned(0) };
    Some(code::SUCCESS)
}
