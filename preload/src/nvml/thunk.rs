//! The assembly code through which every call into NVML runs. Like [`crate::thunk`], it needs no
//! signatures of functions: it preserves the argument registers, and copies eight words of stack
//! arguments. No function of NVML has an argument in a vector register.

use core::arch::global_asm;

use super::{NvmlAction, enter, leave};
use crate::sys;

/// Stack frame of one call into NVML. The thunk depends on this layout.
#[repr(C, align(16))]
pub struct NvmlFrame {
    /// Number of the stub through which the function was called.
    pub place: u64,
    /// Return address of the call. It shows whether the application or NVML itself has made the
    /// call.
    pub caller: usize,
    /// Register rax, as the real function returned it.
    pub result: u64,
    /// Address of the function that the thunk calls or jumps to.
    pub target: usize,
    /// The call's register arguments: rdi, rsi, rdx, rcx, r8, r9.
    pub arguments: [u64; 6],
    /// For a call that waits for events: time at which its wait ends. 0, the initial value, means
    /// that the time was not computed yet.
    until_us: u64,
    unused: u64,
}

const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(NvmlFrame, caller) == 8);
    assert!(offset_of!(NvmlFrame, result) == 16);
    assert!(offset_of!(NvmlFrame, target) == 24);
    assert!(offset_of!(NvmlFrame, arguments) == 32);
    assert!(offset_of!(NvmlFrame, until_us) == 80);
    assert!(size_of::<NvmlFrame>() == 96);
};

impl NvmlFrame {
    /// Sets the result of a call that must not reach NVML.
    pub fn answer(&mut self, result: u32) -> NvmlAction {
        self.result = result.into();
        NvmlAction::Answered
    }

    /// Computes the time at which a call that waits for events must end. The call's arguments are
    /// (set, data, milliseconds).
    pub fn begin_wait(&mut self) {
        let [_, _, timeout_ms, ..] = self.arguments;
        if self.until_us == 0 {
            self.until_us = sys::now_us() + u64::from(timeout_ms as u32) * 1_000;
        }
    }

    /// Remaining time of a call that waits for events, in microseconds.
    pub fn left_us(&self) -> u64 {
        self.until_us.saturating_sub(sys::now_us())
    }

    /// Sets the timeout of the next wait in NVML to the remaining time of the call, but to 100 ms
    /// at most. So a long wait is split into short ones, and the call soon notices that the gate
    /// was closed. Returns false if no time remains. The first use for a call always returns true,
    /// so that even a call with the timeout 0 reaches NVML once.
    pub fn slice_wait(&mut self) -> bool {
        const SLICE_MS: u64 = 100;
        let is_first = self.until_us == 0;
        self.begin_wait();
        let left_ms = self.left_us().div_ceil(1_000).min(SLICE_MS);
        let [_, _, timeout_ms, ..] = &mut self.arguments;
        *timeout_ms = left_ms;
        is_first || left_ms > 0
    }
}

/// Number of spare stubs. They stand for functions of a second copy of NVML and for unlisted
/// functions.
pub const SPARE: usize = 112;
/// Number of all stubs, spare stubs included.
pub const STUBS: usize = affinode_cuda_sys::nvml::COUNT + SPARE;
const STRIDE: usize = 16;

global_asm!(
    ".text",
    ".p2align 4",
    ".globl affinode_nvml_thunk",
    ".hidden affinode_nvml_thunk",
    ".type affinode_nvml_thunk, @function",
    "affinode_nvml_thunk:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "sub rsp, {frame_bytes}",
    "mov qword ptr [rsp], r11",
    "mov rax, qword ptr [rbp + 8]",
    "mov qword ptr [rsp + 8], rax",
    "mov qword ptr [rsp + 32], rdi",
    "mov qword ptr [rsp + 40], rsi",
    "mov qword ptr [rsp + 48], rdx",
    "mov qword ptr [rsp + 56], rcx",
    "mov qword ptr [rsp + 64], r8",
    "mov qword ptr [rsp + 72], r9",
    "mov qword ptr [rsp + 80], 0",
    "2:",
    "mov rdi, rsp",
    "call {enter}",
    "mov r11, qword ptr [rsp + 24]",
    "mov rdi, qword ptr [rsp + 32]",
    "mov rsi, qword ptr [rsp + 40]",
    "mov rdx, qword ptr [rsp + 48]",
    "mov rcx, qword ptr [rsp + 56]",
    "mov r8, qword ptr [rsp + 64]",
    "mov r9, qword ptr [rsp + 72]",
    "cmp eax, 1",
    "jb 3f",
    "ja 4f",
    // The call is counted: copy its stack arguments, then call the function.
    "push qword ptr [rbp + 72]",
    "push qword ptr [rbp + 64]",
    "push qword ptr [rbp + 56]",
    "push qword ptr [rbp + 48]",
    "push qword ptr [rbp + 40]",
    "push qword ptr [rbp + 32]",
    "push qword ptr [rbp + 24]",
    "push qword ptr [rbp + 16]",
    "call r11",
    "add rsp, 64",
    "mov qword ptr [rsp + 16], rax",
    "mov rdi, rsp",
    "call {leave}",
    "test eax, eax",
    "jnz 2b",
    "4:",
    "mov rax, qword ptr [rsp + 16]",
    ".cfi_remember_state",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_restore_state",
    // Not counted: jump, as if this library were not loaded.
    "3:",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "jmp r11",
    ".cfi_endproc",
    ".size affinode_nvml_thunk, . - affinode_nvml_thunk",
    ".p2align 4",
    ".globl affinode_nvml_stubs",
    ".hidden affinode_nvml_stubs",
    "affinode_nvml_stubs:",
    ".cfi_startproc",
    ".set affinode_nvml_at, 0",
    ".rept {stubs}",
    "endbr64",
    "mov r11d, affinode_nvml_at",
    "jmp affinode_nvml_thunk",
    ".p2align 4",
    ".set affinode_nvml_at, affinode_nvml_at + 1",
    ".endr",
    ".cfi_endproc",
    enter = sym enter,
    leave = sym leave,
    stubs = const STUBS,
    frame_bytes = const size_of::<NvmlFrame>(),
);

unsafe extern "C" {
    static affinode_nvml_stubs: u8;
}

/// Returns the address of a stub's code.
pub fn stub(place: usize) -> usize {
    (&raw const affinode_nvml_stubs) as usize + place * STRIDE
}
