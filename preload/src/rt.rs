//! The symbols that the compiler and `core` require of the platform. This library defines them
//! itself, because it is linked without libc.

use core::arch::global_asm;

// The compiler emits calls to these functions. They are hidden, so the application keeps its own.
global_asm!(
    ".text",
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    ".hidden memcpy, memmove, memset, memcmp, bcmp, strlen",
    ".type memcpy, @function",
    ".type memmove, @function",
    ".type memset, @function",
    ".type memcmp, @function",
    ".type bcmp, @function",
    ".type strlen, @function",
    "memmove:",
    ".cfi_startproc",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jb 1f",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    // The destination begins inside the source, so copy from the end.
    "1:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "bcmp:",
    "memcmp:",
    "xor ecx, ecx",
    "2:",
    "cmp rcx, rdx",
    "je 3f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "je 2b",
    "ret",
    "3:",
    "xor eax, eax",
    "ret",
    "strlen:",
    "lea rax, [rdi - 1]",
    "4:",
    "inc rax",
    "cmp byte ptr [rax], 0",
    "jne 4b",
    "sub rax, rdi",
    "ret",
    ".cfi_endproc",
);

/// The panic handler, which is never reached. No operation in this library can panic, and a test
/// checks the built file for this. If it were reached, the thread would stop, and the application
/// would continue.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        crate::sys::sleep_us(1_000_000);
    }
}
