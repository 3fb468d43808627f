//! Driver functions that look up functions (`cuGetProcAddress` with both signatures), and return
//! the names of errors.

use std::ffi::{CStr, c_char};

use affinode_sim_protocol::CUDA_VERSION;

use crate::abi::{CUresult, INVALID_VALUE, NOT_FOUND, Out, Outcome, Text};
use crate::api::{Symbol, cuda_api, symbols};

const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// The driver's C type `CUdriverProcAddressQueryResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Search {
    Found = 0,
    NotFound = 1,
    VersionNotSufficient = 2,
}

cuda_api! {
    Always 11030 fn cuGetProcAddress(name: Text, address: Out<usize>, version: i32, flags: u64) |_d, _z| {
        let (found, symbol) = find(name, version, flags)?;
        address.set(symbol.map_or(0, |symbol| symbol.address.0 as usize))?;
        if found == Search::Found { Ok(()) } else { Err(NOT_FOUND) }
    }
    Always 12000 fn cuGetProcAddress_v2(name: Text, address: Out<usize>, version: i32, flags: u64, status: Out<u32>) |_d, _z| {
        let (found, symbol) = find(name, version, flags)?;
        address.set(symbol.map_or(0, |symbol| symbol.address.0 as usize))?;
        status.set_if_wanted(found as u32);
        Ok(())
    }
    Always 6000 fn cuGetErrorName(error: CUresult, text: Out<*const c_char>) |_d, _z| { describe(error, text, |known| known.1) }
    Always 6000 fn cuGetErrorString(error: CUresult, text: Out<*const c_char>) |_d, _z| { describe(error, text, |known| known.2) }
}

fn find(name: Text, version: i32, flags: u64) -> Outcome<(Search, Option<&'static Symbol>)> {
    if version > CUDA_VERSION || flags > PER_THREAD_DEFAULT_STREAM {
        return Err(INVALID_VALUE);
    }
    Ok(look_up(name.get()?, version, flags == PER_THREAD_DEFAULT_STREAM))
}

/// Looks up a function for `cuGetProcAddress`. Returns the latest version of the function that is
/// not later than the caller's CUDA version. Prefers the variant for per-thread default streams, if
/// it is requested and exists.
fn look_up(name: &str, version: i32, per_thread: bool) -> (Search, Option<&'static Symbol>) {
    let named = || symbols().filter(|symbol| base(symbol.name).0 == name);
    let best = |per_thread: bool| {
        let fits =
            move |symbol: &&Symbol| base(symbol.name).1 == per_thread && symbol.since <= version;
        named().filter(fits).max_by_key(|symbol| symbol.since)
    };
    let symbol = if per_thread { best(true).or_else(|| best(false)) } else { best(false) };
    match symbol {
        Some(_) => (Search::Found, symbol),
        None if named().next().is_some() => (Search::VersionNotSufficient, None),
        None => (Search::NotFound, None),
    }
}

/// Splits the base name from a function's name. Also returns whether the name is that of the
/// variant for per-thread default streams. `cuMemcpyHtoD_v2_ptds` returns `cuMemcpyHtoD` and true.
fn base(name: &str) -> (&str, bool) {
    let plain = name.strip_suffix("_ptds").or_else(|| name.strip_suffix("_ptsz"));
    let (name, per_thread) = (plain.unwrap_or(name), plain.is_some());
    let version = name
        .rsplit_once("_v")
        .filter(|(_, digits)| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()));
    (version.map_or(name, |(base, _)| base), per_thread)
}

fn describe(
    error: CUresult,
    text: Out<*const c_char>,
    part: fn(&Known) -> &'static CStr,
) -> Outcome {
    match KNOWN.iter().find(|known| known.0 == error) {
        Some(known) => text.set(part(known).as_ptr()),
        None => {
            text.set(std::ptr::null())?;
            Err(INVALID_VALUE)
        }
    }
}

type Known = (CUresult, &'static CStr, &'static CStr);

const KNOWN: &[Known] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is already enabled"),
    (705, c"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", c"peer access has not been enabled"),
    (
        712,
        c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped",
    ),
    (
        713,
        c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region",
    ),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn name(base: &str, version: i32, per_thread: bool) -> Option<&'static str> {
        look_up(base, version, per_thread).1.map(|symbol| symbol.name)
    }

    #[test]
    fn the_version_and_the_flag_choose_the_function() {
        assert_eq!(name("cuMemAlloc", 13000, false), Some("cuMemAlloc_v2"));
        assert_eq!(name("cuCtxCreate", 11000, false), Some("cuCtxCreate_v2"));
        assert_eq!(name("cuCtxCreate", 13000, true), Some("cuCtxCreate_v4"));
        assert_eq!(name("cuMemcpyHtoD", 12000, true), Some("cuMemcpyHtoD_v2_ptds"));
        assert_eq!(name("cuGetProcAddress", 11080, false), Some("cuGetProcAddress"));
        assert_eq!(name("cuGetProcAddress", 12000, false), Some("cuGetProcAddress_v2"));
        assert_eq!(look_up("cuMemCreate", 10000, false).0, Search::VersionNotSufficient);
        assert_eq!(look_up("cuNothing", 13000, false).0, Search::NotFound);
    }

    #[test]
    fn no_name_is_listed_twice() {
        let mut names: Vec<_> = symbols().map(|symbol| symbol.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
