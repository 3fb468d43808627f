//! Detects tools that access the driver by other ways than its public functions: profilers,
//! sanitizers, debuggers and video libraries.
//!
//! The driver has private tables of functions, which `cuGetExportTable` returns. The gate does not
//! hold calls of these functions. The tables cannot be replaced by wrappers, because the CUDA
//! runtime checks them by a hash. But the request for a table is an ordinary call, which this
//! library sees. A table of the CUDA runtime or its libraries is harmless: its functions are called
//! only from inside calls that the gate holds. A table that is not listed here is treated as the
//! table of a tool. The threads of a tool call the table's functions at any time. While the context
//! is checkpointed, such a call hangs, and the process is lost at the restore (CUPTI, H200, driver
//! 580.159). So a process that has requested such a table keeps its context permanently.
//!
//! ```text
//! request ──bit in the counters──> gate ──resident──> driver: the tool gets the table
//!                │
//!                └──> agent: gate closed, every call ended, bit? no checkpoint
//! ```

use core::ffi::CStr;

use affinode_proto::wire::Hazards;

use crate::{elf, libc, sys};

/// Identifier of a driver table: the bytes of a `CUuuid`.
pub type TableId = [u8; 16];

/// Ids of harmless tables: those that the CUDA runtime, its math libraries, NVRTC and NVML request
/// in programs without any tool (CUDA 13.0, driver 580.159.04, H200). The first byte of an id is
/// the highest byte of the number.
const HARMLESS: [u128; 12] = [
    0xf8cff951_21468b4e_b9e2fb46_9e7c0dd9,
    0x6bd5fb6c_5bf4e74a_8987d939_12fd9df9,
    0xa094798c_2e742e74_93f20800_200c0a66,
    0x42d85a81_23f6cb47_8298f6e7_8a3aecdc,
    0xc693336e_1121df11_a8c368f3_55d89593,
    0x263e8860_7cd26143_92f6bbd5_006dfa7e,
    0xd4082055_bde6704b_8d34ba12_3c66e1f2,
    // Requested by cuBLASLt and cuFFT. Tools request these tables too, but always further ones as
    // well.
    0x21318c60_97143248_8ca641ff_7324c8f2,
    0x6e163fbe_b958444d_835ce182_aff1991e,
    // Requested by cuBLASLt in language models.
    0x1734dc26_800d4745_8726c0f1_e7dd8bca,
    // Requested by NVRTC.
    0xda9151d3_3ae6cc41_a5c04f26_d533e328,
    // Requested by NVML.
    0x69a28e9f_24498b47_b030c5da_330ea4e9,
];
/// Ids of tables that video libraries request: NVDEC requests the first table, NVENC the second
/// table. Tools also request the second table.
const VIDEO: [u128; 2] =
    [0x9af0707b_8e2dd84c_8e4eb994_c82ddc35, 0xb10541e1_f7c7c74a_9f64f223_be99f1e2];

/// Environment variables that load a tool into the process.
const INJECTIONS: [&[u8]; 2] = [b"CUDA_INJECTION64_PATH", b"NVTX_INJECTION64_PATH"];

/// Names of tool libraries that a process loads only if it uses the tool. CUPTI is not listed,
/// because frameworks are linked against it.
const OF_TOOLS: [&[u8]; 5] = [
    b"libsanitizer-",
    b"libInterceptorInjection",
    b"libcuda-injection",
    b"libToolsInjection",
    b"libcudadebugger.so",
];
/// Libraries that decode and encode video. They are harmless until they request a driver table.
const OF_VIDEO: [&[u8]; 2] = [b"libnvcuvid.so", b"libnvidia-encode.so"];

/// Returns the id of the table that a call of `cuGetExportTable` requests. Returns 0 if the call
/// names none.
///
/// # Safety
/// `id` must be null or point to a table's id.
pub unsafe fn table(id: *const TableId) -> u128 {
    // SAFETY: the caller guarantees that `id` points to a table's id if it is not null.
    if id.is_null() { 0 } else { u128::from_be_bytes(unsafe { id.read_unaligned() }) }
}

/// Returns the hazard that a request for this table adds. It is empty if the table does not belong
/// to a tool.
pub fn of_request(table: u128) -> Hazards {
    let [decoder, shared] = VIDEO;
    if table == 0 || HARMLESS.contains(&table) {
        Hazards(0)
    } else if table == decoder || (table == shared && is_loaded(&OF_VIDEO)) {
        Hazards::VIDEO
    } else {
        Hazards::TOOLS
    }
}

/// Returns the hazard of tools that environment variables load into the process. This hazard is
/// known before the process makes its first CUDA call.
pub fn in_environment() -> Hazards {
    let is_set = |name: &&[u8]| libc::environment(name).is_some_and(|value| !value.is_empty());
    if INJECTIONS.iter().any(is_set) { Hazards::TOOLS } else { Hazards(0) }
}

/// Returns the hazard of the tools that are loaded now, and of a tracer (debugger). Only the agent
/// calls this function.
pub fn found() -> Hazards {
    if is_mapped(MAPS, &OF_TOOLS) || is_traced() { Hazards::TOOLS } else { Hazards(0) }
}

const MAPS: &CStr = c"/proc/self/maps";

/// Whether the process has mapped a file whose name begins with one of `names`. The function reads
/// the file `maps` instead of the loader's list of objects. If the agent walked that list during a
/// fork, the child would hang, because glibc does not reset the list's lock in the child. If `maps`
/// cannot be read, the function walks the list nevertheless. The reason is that an undetected tool
/// is worse: the driver could fail to restore the process.
fn is_mapped(maps: &CStr, names: &[&[u8]]) -> bool {
    const KEPT_BYTES: usize = 64; // more than a name has, so that one on the border is found
    let Some(maps) = sys::open_to_read(maps) else { return is_loaded(names) };
    let mut buffer = [0_u8; 2048];
    let mut kept = 0;
    loop {
        let Some(free) = buffer.get_mut(kept..) else { return false };
        let read = match sys::task::read(maps.number(), free) {
            Ok(0) if kept > 0 => return false,
            Ok(0) | Err(_) => return is_loaded(names),
            Ok(read) => read,
        };
        let Some(text) = buffer.get(..kept + read) else { return false };
        let is_named = |name: &[u8]| {
            text.windows(name.len() + 1).any(|part| part.strip_prefix(b"/") == Some(name))
        };
        if names.iter().any(|name| is_named(name)) {
            return true;
        }
        let end = kept + read;
        kept = KEPT_BYTES.min(end);
        buffer.copy_within(end - kept..end, 0);
    }
}

fn is_loaded(names: &[&[u8]]) -> bool {
    elf::find(|object| {
        let file = object.name.rsplit(|byte| *byte == b'/').next()?;
        names.iter().any(|name| file.starts_with(name)).then_some(())
    })
    .is_some()
}

fn is_traced() -> bool {
    const STATUS: &CStr = c"/proc/self/status";
    let mut buffer = [0; 1024];
    sys::read_file(STATUS, &mut buffer).is_some_and(names_tracer)
}

/// Whether the text of a process's status file names a tracer (debugger).
fn names_tracer(status: &[u8]) -> bool {
    const FIELD: &[u8] = b"TracerPid:\t";
    let mut lines = status.split(|byte| *byte == b'\n');
    lines.any(|line| line.strip_prefix(FIELD).is_some_and(|pid| !pid.starts_with(b"0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_with_a_tracer_is_traced() {
        assert!(!names_tracer(b"Name:\tx\nTracerPid:\t0\nUid:\t1\n"));
        assert!(names_tracer(b"Name:\tx\nTracerPid:\t17\nUid:\t1\n"));
        assert!(!names_tracer(b""), "nothing could be read");
    }

    #[test]
    fn table_of_no_known_library_is_a_tools() {
        let id = HARMLESS[0].to_be_bytes();
        assert_eq!(id[..2], [0xf8, 0xcf], "the first byte is the highest");
        // SAFETY: one pointer is null, and the other points to an id.
        let asked = [core::ptr::null(), &raw const id].map(|id| unsafe { table(id) });
        assert_eq!(asked, [0, HARMLESS[0]]);
        for harmless in asked.into_iter().chain(HARMLESS) {
            assert_eq!(of_request(harmless), Hazards(0), "{harmless:032x}");
        }
        // The first table that CUPTI requests.
        let of_cupti = 0x2c8e0ad8_0710ab4e_90dd5471_9fe5f74b;
        assert_eq!(of_request(of_cupti), Hazards::TOOLS);
        // Without a video library in the process, a request for the second table is that of a tool.
        assert_eq!(VIDEO.map(of_request), [Hazards::VIDEO, Hazards::TOOLS]);
    }

    #[test]
    fn libraries_are_known_by_their_file() {
        assert!(is_loaded(&[b"libc.so"]));
        assert!(!is_loaded(&OF_TOOLS) && !is_loaded(&OF_VIDEO));
        // If the maps cannot be opened or read, or are empty, the loader's list of objects is used.
        for maps in [MAPS, c"/no/such/maps", c"/proc/self", c"/dev/null"] {
            assert!(is_mapped(maps, &[b"no-such-library", b"libc.so"]), "{maps:?}");
            assert!(!is_mapped(maps, &OF_TOOLS) && !is_mapped(maps, &OF_VIDEO), "{maps:?}");
            assert!(!is_mapped(maps, &[b"ibc.so"]), "{maps:?}");
        }
    }
}
