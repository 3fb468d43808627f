//! The assembly code through which every hooked CUDA call runs. It needs no signatures of
//! functions, because it preserves the argument registers and copies eight words of stack
//! arguments. Eight words are the 64 bytes that `cuIpcOpenMemHandle` takes by value. No other
//! driver function has more than five words of stack arguments.
//!
//! ```text
//! stub: r11 = entry ──> thunk
//!   thread has a slot in this process, entry is not marked for the slow path
//!     ──> inflight += 1, gate open? ──> calls += 1 ──> real function ──> inflight -= 1
//!         (and calls are not recorded, or this call is not picked)
//!   anything else (slow path)
//!     ──> save all argument registers ──> gate::enter ──> real function ──> gate::leave
//!                                       ^    ├── not managed: jump to the real function  │
//!                                       │    └── answered: its result, nothing is called  │
//!                                       └── out of memory, waited, memory is free now ────┘
//! ```
//!
//! The fast path has no system call, lock, atomic operation or clock. The processor may reorder the
//! increment and the read of the gate. Therefore the agent executes a barrier on all threads
//! (`membarrier`) after it has closed the gate, and only then reads the counts.

use core::arch::global_asm;

use affinode_proto::wire::counters::{PAGE_BYTES, header, slot};

use crate::counters::ThreadSlot;
use crate::gate::{HookFrame, enter, leave};
use crate::hook_table::{ENTRIES, POOL, layout};
use crate::process::PROCESS;

/// Offset of the field in a thread slot that counts down the calls before the next recorded call.
const SKIP: usize = core::mem::offset_of!(ThreadSlot, pick.skip);

global_asm!(
    ".text",
    ".p2align 6",
    ".globl affinode_thunk",
    ".hidden affinode_thunk",
    ".type affinode_thunk, @function",
    "affinode_thunk:",
    ".cfi_startproc",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    // r10 = the thread's slot, if the thread is registered with this process.
    "mov rax, qword ptr [rip + affinode_thread@GOTTPOFF]",
    "mov r10, qword ptr fs:[rax + 8]",
    "cmp r10, qword ptr [rip + {process}]",
    "mov r10, qword ptr fs:[rax]",
    "jne 3f",
    "cmp byte ptr [r11 + {thorough}], 0",
    "jne 3f",
    // Count first. Then compare the gate and the sampling rate with 0: both are in one word of the
    // slot's page.
    "inc dword ptr [r10 + {inflight}]",
    "mov rax, r10",
    "and rax, -{page_bytes}",
    "cmp qword ptr [rax + {gate}], 0",
    "jne 7f",
    "8:",
    "movzx eax, word ptr [r11 + {counter}]",
    "inc qword ptr [r10 + rax]",
    "mov eax, dword ptr [r11 + {number}]",
    "mov dword ptr [r10 + {last_hook}], eax",
    "push qword ptr [rbp + 72]",
    "push qword ptr [rbp + 64]",
    "push qword ptr [rbp + 56]",
    "push qword ptr [rbp + 48]",
    "push qword ptr [rbp + 40]",
    "push qword ptr [rbp + 32]",
    "push qword ptr [rbp + 24]",
    "push qword ptr [rbp + 16]",
    "call qword ptr [r11 + {real}]",
    // A child that was forked inside the call returns here too. The slot in r10 is then the
    // parent's slot.
    "mov rcx, qword ptr [rip + affinode_thread@GOTTPOFF]",
    "mov r10, qword ptr fs:[rcx + 8]",
    "cmp r10, qword ptr [rip + {process}]",
    "mov r10, qword ptr fs:[rcx]",
    "jne 1f",
    "dec dword ptr [r10 + {inflight}]",
    "1:",
    ".cfi_remember_state",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_restore_state",
    // The gate is open, but calls are recorded: most calls continue, and the slow path records the
    // others.
    "7:",
    "cmp dword ptr [rax + {gate}], 0",
    "jne 2f",
    "dec dword ptr [r10 + {skip}]",
    "jns 8b",
    // The gate is not open: subtract the count, and let the slow path decide.
    "2:",
    "dec dword ptr [r10 + {inflight}]",
    // The slow path, with a HookFrame at rsp.
    "3:",
    "sub rsp, {frame_bytes}",
    "mov qword ptr [rsp + 16], r11",
    "mov qword ptr [rsp + 32], rdi",
    "mov qword ptr [rsp + 40], rsi",
    "mov qword ptr [rsp + 48], rdx",
    "mov qword ptr [rsp + 56], rcx",
    "mov qword ptr [rsp + 64], r8",
    "mov qword ptr [rsp + 72], r9",
    "movaps xmmword ptr [rsp + 80], xmm0",
    "movaps xmmword ptr [rsp + 96], xmm1",
    "movaps xmmword ptr [rsp + 112], xmm2",
    "movaps xmmword ptr [rsp + 128], xmm3",
    "movaps xmmword ptr [rsp + 144], xmm4",
    "movaps xmmword ptr [rsp + 160], xmm5",
    "movaps xmmword ptr [rsp + 176], xmm6",
    "movaps xmmword ptr [rsp + 192], xmm7",
    "mov qword ptr [rsp + 224], 0",
    "6:",
    "mov rdi, rsp",
    "call {enter}",
    "mov r11, qword ptr [rsp + 216]",
    "mov rdi, qword ptr [rsp + 32]",
    "mov rsi, qword ptr [rsp + 40]",
    "mov rdx, qword ptr [rsp + 48]",
    "mov rcx, qword ptr [rsp + 56]",
    "mov r8, qword ptr [rsp + 64]",
    "mov r9, qword ptr [rsp + 72]",
    "movaps xmm0, xmmword ptr [rsp + 80]",
    "movaps xmm1, xmmword ptr [rsp + 96]",
    "movaps xmm2, xmmword ptr [rsp + 112]",
    "movaps xmm3, xmmword ptr [rsp + 128]",
    "movaps xmm4, xmmword ptr [rsp + 144]",
    "movaps xmm5, xmmword ptr [rsp + 160]",
    "movaps xmm6, xmmword ptr [rsp + 176]",
    "movaps xmm7, xmmword ptr [rsp + 192]",
    "cmp eax, 1",
    "jb 4f",
    "ja 5f",
    // Result 1 of `enter`: the call is counted. Copy its stack arguments and call the function.
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
    "mov qword ptr [rsp + 24], rax",
    "mov qword ptr [rsp + 208], rdx",
    "movaps xmmword ptr [rsp + 80], xmm0",
    "mov rdi, rsp",
    "call {leave}",
    // Result 1 of `leave`: the call found no memory and has waited. Repeat it, through the gate.
    "test eax, eax",
    "jnz 6b",
    "mov rax, qword ptr [rsp + 24]",
    "mov rdx, qword ptr [rsp + 208]",
    "movaps xmm0, xmmword ptr [rsp + 80]",
    ".cfi_remember_state",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_restore_state",
    // Result 0 of `enter`: the call is not managed. Jump, as if this library were not loaded.
    "4:",
    ".cfi_remember_state",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "jmp r11",
    ".cfi_restore_state",
    // Result 2 of `enter`: call nothing. The frame has the result.
    "5:",
    "mov eax, dword ptr [rsp + 24]",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size affinode_thunk, . - affinode_thunk",
    // The stubs of the pool. There is one per entry, at the same distance from each other as the
    // entries.
    ".p2align 6",
    ".globl affinode_stubs",
    ".hidden affinode_stubs",
    "affinode_stubs:",
    ".cfi_startproc",
    ".set affinode_at, 0",
    ".rept {pool}",
    "endbr64",
    "lea r11, [rip + {entries} + affinode_at]",
    "jmp affinode_thunk",
    ".p2align 4",
    ".set affinode_at, affinode_at + {stride}",
    ".endr",
    ".cfi_endproc",
    process = sym PROCESS,
    entries = sym ENTRIES,
    enter = sym enter,
    leave = sym leave,
    pool = const POOL,
    stride = const layout::STRIDE,
    real = const layout::REAL,
    number = const layout::NUMBER,
    counter = const layout::COUNTER,
    thorough = const layout::THOROUGH,
    inflight = const slot::INFLIGHT,
    last_hook = const slot::LAST_HOOK,
    gate = const header::GATE,
    skip = const SKIP,
    page_bytes = const PAGE_BYTES,
    frame_bytes = const size_of::<HookFrame>(),
);

unsafe extern "C" {
    static affinode_stubs: u8;
}

/// Returns the address of the assembly stub that belongs to one entry of the hook pool. `index` is
/// the position of the entry in the pool.
pub fn stub(index: usize) -> usize {
    (&raw const affinode_stubs) as usize + index * layout::STRIDE
}
