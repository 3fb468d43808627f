//! Hooks the look-ups of functions by `dlsym` and `cuGetProcAddress`. The real look-up is called
//! first. If it returns a function of libcuda whose calls must pass the gate, the application gets
//! the address of that function's stub instead.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use affinode_cuda_sys::{hook, result};

use crate::{elf, hook_table, libcuda, nvml, process, thunk};

/// True if the application got the address of a function of libcuda that has no stub. Calls of that
/// function bypass the gate.
static LEAKING: AtomicBool = AtomicBool::new(false);

/// Whether every driver function that the application has looked up so far passes the gate.
pub fn is_tight() -> bool {
    !LEAKING.load(Ordering::Relaxed)
}

/// Records that the application got a driver function without a stub, whose calls bypass the gate.
pub fn leak() {
    LEAKING.store(true, Ordering::Relaxed);
}

/// Returns the address to give to the application for a function that a look-up has found: the
/// function's stub, or the function itself if it has no stub.
fn hooked(name: &[u8], real: usize) -> usize {
    if is_of_nvml(name) {
        return nvml::hooked(name, real);
    }
    if process::is_disabled() || !libcuda::owns(real) {
        return real;
    }
    if hook::base(name) == b"cuGetProcAddress" {
        return LookupEntry::for_real(real);
    }
    if hook::passes(name) {
        return real;
    }
    let (number, class) = hook::classify(name);
    if let Some(index) = hook_table::index_of(real, number, class) {
        return thunk::stub(index);
    }
    LEAKING.store(true, Ordering::Relaxed);
    real
}

/// Address of the driver's `cuGetProcAddress` that one wrapper calls. The driver has several such
/// functions: two signatures, each with a variant for per-thread default streams. A wrapper passes
/// the five arguments of the longer signature to all of them. A function with four arguments
/// ignores the fifth.
struct LookupEntry {
    real: AtomicUsize,
}

type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut usize, i32, u64, *mut c_void) -> u32;

/// The driver's functions behind the wrappers of `cuGetProcAddress`, one entry for each wrapper.
/// Entries 0 and 1 belong to the exported `cuGetProcAddress` and `cuGetProcAddress_v2`.
static LOOKUP_ENTRIES: [LookupEntry; 8] = [const { LookupEntry { real: AtomicUsize::new(0) } }; 8];
const WAYS: [GetProcAddress; 8] = [
    through::<0>,
    through::<1>,
    through::<2>,
    through::<3>,
    through::<4>,
    through::<5>,
    through::<6>,
    through::<7>,
];

impl LookupEntry {
    fn for_real(real: usize) -> usize {
        for (door, way) in LOOKUP_ENTRIES.iter().zip(WAYS).skip(2) {
            let owner = door
                .real
                .compare_exchange(0, real, Ordering::AcqRel, Ordering::Acquire)
                .unwrap_or_else(|owner| owner);
            if owner == 0 || owner == real {
                return way as usize;
            }
        }
        LEAKING.store(true, Ordering::Relaxed);
        real
    }

    fn real(&self, exported: &[u8]) -> Option<usize> {
        let known = self.real.load(Ordering::Acquire);
        if known != 0 {
            return Some(known);
        }
        let found = libcuda::function(exported)?;
        self.real.store(found, Ordering::Release);
        Some(found)
    }
}

/// Wrapper of `cuGetProcAddress`. Calls the driver's function in entry `DOOR` of
/// [`LOOKUP_ENTRIES`]. Entry 0 is the exported `cuGetProcAddress`, entry 1 the exported
/// `cuGetProcAddress_v2`.
///
/// # Safety
/// See the driver's documentation of `cuGetProcAddress`.
pub unsafe extern "C" fn through<const DOOR: usize>(
    symbol: *const c_char,
    function: *mut usize,
    version: i32,
    flags: u64,
    status: *mut c_void,
) -> u32 {
    const EXPORTED: [&[u8]; 2] = [b"cuGetProcAddress", b"cuGetProcAddress_v2"];
    let exported = EXPORTED.get(DOOR).copied().unwrap_or_default();
    let Some(real) = LOOKUP_ENTRIES.get(DOOR).and_then(|door| door.real(exported)) else {
        return result::NOT_INITIALIZED;
    };
    // SAFETY: the address of a cuGetProcAddress, see `LookupEntry`.
    let real: GetProcAddress = unsafe { core::mem::transmute(real) };
    // SAFETY: the application's own arguments.
    let code = unsafe { real(symbol, function, version, flags, status) };
    if code == result::SUCCESS && !symbol.is_null() && !function.is_null() {
        // SAFETY: the driver has read the name and written the pointer with success.
        unsafe {
            let found = function.read();
            if found != 0 {
                function.write(hooked(CStr::from_ptr(symbol).to_bytes(), found));
            }
        }
    }
    code
}

/// What the exported `dlsym` does next. It is returned in two registers.
#[repr(C)]
pub struct LookupResult {
    address: usize,
    /// 1 if the exported `dlsym` must jump to the real `dlsym`. After a jump, the return address
    /// that the real `dlsym` sees is still in the application.
    jump: usize,
}

impl LookupResult {
    const JUMP: LookupResult = LookupResult { address: 0, jump: 1 };

    fn is(address: usize) -> LookupResult {
        LookupResult { address, jump: 0 }
    }
}

/// Address of the real `dlsym`, to which the exported `dlsym` jumps. 0 if it is not known yet.
pub static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);

/// Finds the real `dlsym`: the first `dlsym` of an object that was loaded after this library.
/// Objects loaded earlier are skipped, because their `dlsym` may be a hook that calls this
/// library's `dlsym`. Returns 0 if no object after this library has a `dlsym`. The program can then
/// reach the exported `dlsym` only by a weak reference, which would be 0 without this library.
pub extern "C" fn find_dlsym() -> usize {
    let found = next_after(find_dlsym as *const () as usize, b"dlsym").unwrap_or(0);
    REAL_DLSYM.store(found, Ordering::Release);
    found
}

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> usize;

/// Returns the real `dlsym` as a function that this library can call.
fn real_dlsym() -> Option<Dlsym> {
    let known = REAL_DLSYM.load(Ordering::Acquire);
    let address = if known == 0 { find_dlsym() } else { known };
    // SAFETY: a function of that name has this signature.
    (address != 0).then(|| unsafe { core::mem::transmute::<usize, Dlsym>(address) })
}

fn is_of_nvml(name: &[u8]) -> bool {
    name.starts_with(b"nvml")
}

/// Looks up a name that begins with `cu` and a capital letter, or with `nvml`, for the exported
/// `dlsym`.
///
/// # Safety
/// `name` must be a C string. Only the exported `dlsym` may call this function.
pub unsafe extern "C" fn dlsym_of_driver(
    handle: *mut c_void,
    name: *const c_char,
    caller: usize,
) -> LookupResult {
    const RTLD_DEFAULT: usize = 0;
    const RTLD_NEXT: usize = usize::MAX;
    let Some(real) = real_dlsym().filter(|_| !process::is_disabled()) else {
        return LookupResult::JUMP;
    };
    // SAFETY: the caller guarantees that `name` is a C string.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    let is_of_nvml = is_of_nvml(text);
    let owns = if is_of_nvml { nvml::owns } else { libcuda::owns };
    let function = if is_of_nvml { nvml::function } else { libcuda::function };
    if handle as usize == RTLD_NEXT {
        // Here the real `dlsym` would resolve relative to this library, not to the caller.
        return match next_after(caller, text) {
            Some(found) if owns(found) => LookupResult::is(hooked(text, found)),
            _ => LookupResult::JUMP,
        };
    }
    // SAFETY: the application's own arguments.
    let found = unsafe { real(handle, name) };
    if found != 0 && !is_ours(found) {
        return LookupResult::is(hooked(text, found));
    }
    // The look-up has found nothing, or only this library's export. Without a handle, the result
    // depends on the caller's scope, which only the loader knows. Any function of a loaded library
    // that works is then better than none.
    let may_be_local = found != 0 || handle as usize == RTLD_DEFAULT;
    match function(text).filter(|_| may_be_local) {
        Some(of_driver) => LookupResult::is(hooked(text, of_driver)),
        None if found == 0 => LookupResult::JUMP,
        // SAFETY: `name` is the application's own argument. RTLD_NEXT continues after this library,
        // whose own function was found before.
        None => LookupResult::is(unsafe { real(RTLD_NEXT as *mut c_void, name) }),
    }
}

fn is_ours(address: usize) -> bool {
    elf::find(|object| elf::is_own(object).then(|| object.contains(address))) == Some(true)
}

/// Returns the first function of this name in the objects that follow the caller's object in load
/// order.
fn next_after(caller: usize, name: &[u8]) -> Option<usize> {
    let mut passed = false;
    elf::find(|object| {
        if passed && !elf::is_own(object) {
            return object.function(name);
        }
        passed |= object.contains(caller);
        None
    })
}
