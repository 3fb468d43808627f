//! The symbols that this library exports to the process: `dlsym`, and every hooked function, for
//! programs that are linked against libcuda or NVML.

use core::arch::naked_asm;

use affinode_cuda_sys::hook::{Class, Function};

use crate::hook_table::HookEntry;
use crate::lookup::{REAL_DLSYM, dlsym_of_driver, find_dlsym, through};

macro_rules! export {
    ($($class:ident { $($name:ident)* })*) => { $($(
        /// Exported symbol that calls the driver's function of this name through the hook.
        ///
        /// # Safety
        /// See the driver's documentation of this function.
        #[allow(non_snake_case)]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            static ENTRY: HookEntry =
                HookEntry::exported(Function::$name as u32 + 1, Class::$class);
            naked_asm!(
                ".cfi_startproc",
                "endbr64",
                "lea r11, [rip + {entry}]",
                "jmp affinode_thunk",
                ".cfi_endproc",
                entry = sym ENTRY,
            )
        }
    )*)* };
}
affinode_cuda_sys::hooked_functions!(export);

macro_rules! export_nvml {
    ($($class:ident { $($name:ident)* })*) => { $($(
        /// Exported symbol that calls NVML's function of this name through the hook.
        ///
        /// # Safety
        /// See NVML's documentation of this function.
        #[allow(non_snake_case)]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            // The stub has no unwind information: it calls nothing, and the information would be
            // larger than the code.
            naked_asm!(
                "endbr64",
                "mov r11d, {place}",
                "jmp affinode_nvml_thunk",
                place = const affinode_cuda_sys::nvml::Function::$name as u32,
            )
        }
    )*)* };
}
affinode_cuda_sys::nvml_functions!(export_nvml);

/// Exported `cuGetProcAddress`, in the version of CUDA 11.3.
///
/// # Safety
/// See the driver's documentation of this function.
#[allow(non_snake_case)]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress() {
    naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "jmp {real}",
        ".cfi_endproc",
        real = sym through::<0>,
    )
}

/// Exported `cuGetProcAddress`, in the version of CUDA 12.0.
///
/// # Safety
/// See the driver's documentation of this function.
#[allow(non_snake_case)]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2() {
    naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "jmp {real}",
        ".cfi_endproc",
        real = sym through::<1>,
    )
}

/// Exported `dlsym`, which the process calls instead of the real one. This library handles names
/// that begin with `cu` and a capital letter, or with `nvml`. For every other name this function
/// jumps to the real `dlsym`. The jump keeps the application's return address, on which the result
/// of the real `dlsym` depends.
///
/// # Safety
/// See the manual page of `dlsym`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym() {
    naked_asm!(
        ".cfi_startproc",
        "endbr64",
        "test rsi, rsi",
        "je 2f",
        "cmp byte ptr [rsi], 0x6e",
        "je 5f",
        "cmp byte ptr [rsi], 0x63",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 0x75",
        "jne 2f",
        "movzx eax, byte ptr [rsi + 2]",
        "sub eax, 0x41",
        "cmp eax, 25",
        "ja 2f",
        // The name begins like that of a function of the driver or of NVML.
        "6:",
        "mov rdx, qword ptr [rsp]",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {driver}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test edx, edx",
        "jne 2f",
        "ret",
        "2:",
        "mov rax, qword ptr [rip + {known}]",
        "test rax, rax",
        "je 3f",
        "jmp rax",
        "3:",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "call {find}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "test rax, rax",
        "je 4f",
        "jmp rax",
        "4:",
        "ret",
        // Compares with "nvml" byte by byte, because the name may be shorter.
        "5:",
        "cmp byte ptr [rsi + 1], 0x76",
        "jne 2b",
        "cmp byte ptr [rsi + 2], 0x6d",
        "jne 2b",
        "cmp byte ptr [rsi + 3], 0x6c",
        "jne 2b",
        "jmp 6b",
        ".cfi_endproc",
        driver = sym dlsym_of_driver,
        known = sym REAL_DLSYM,
        find = sym find_dlsym,
    )
}
