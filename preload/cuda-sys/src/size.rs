//! Computes the number of bytes that a call moves, fills or allocates, from its arguments.

use crate::hook;

/// Returns the size in bytes that a call requests in its register arguments. `number` is the hook
/// number of the function. Returns 0 if the arguments contain no size. The result is the requested
/// size even if the call fails.
#[must_use]
pub fn of_call(number: u32, arguments: &[u64; 6]) -> u64 {
    let Some(name) = hook::name(number).map(str::as_bytes) else { return 0 };
    let base = hook::base(name);
    // The first versions of these functions take sizes of 32 bits. No current program calls them.
    let wide = name.get(base.len()..).is_some_and(|rest| rest.starts_with(b"_v2"));
    let [_, a, b, c, d, _] = *arguments;
    match base {
        b"cuMemcpy" | b"cuMemcpyAsync" => b,
        b"cuMemcpyHtoD" | b"cuMemcpyHtoDAsync" | b"cuMemcpyDtoH" | b"cuMemcpyDtoHAsync"
        | b"cuMemcpyDtoD" | b"cuMemcpyDtoDAsync"
            if wide =>
        {
            b
        }
        b"cuMemcpyDtoA" | b"cuMemcpyAtoD" | b"cuMemcpyHtoA" | b"cuMemcpyHtoAAsync"
        | b"cuMemcpyAtoH" | b"cuMemcpyAtoHAsync"
            if wide =>
        {
            c
        }
        b"cuMemcpyPeer" | b"cuMemcpyPeerAsync" => d,
        b"cuMemcpyAtoA" if wide => d,
        b"cuMemsetD8" | b"cuMemsetD8Async" => b,
        b"cuMemsetD16" | b"cuMemsetD16Async" => b.saturating_mul(2),
        b"cuMemsetD32" | b"cuMemsetD32Async" => b.saturating_mul(4),
        b"cuMemAlloc" | b"cuMemAllocHost" if wide => a,
        b"cuMemAllocAsync"
        | b"cuMemAllocFromPoolAsync"
        | b"cuMemAllocManaged"
        | b"cuMemHostAlloc"
        | b"cuMemCreate"
        | b"cuMemPrefetchAsync" => a,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_that_counts_bytes_is_found() {
        let arguments = [10, 11, 12, 13, 14, 15];
        for (name, bytes) in [
            ("cuMemcpyHtoDAsync_v2_ptsz", 12),
            ("cuMemcpyDtoH_v2", 12),
            ("cuMemcpyHtoD", 0),
            ("cuMemcpyAsync", 12),
            ("cuMemcpyPeer", 14),
            ("cuMemcpyAtoH_v2", 13),
            ("cuMemsetD8_v2", 12),
            ("cuMemsetD32Async", 48),
            ("cuMemAlloc_v2", 11),
            ("cuMemAllocManaged", 11),
            ("cuLaunchKernel", 0),
        ] {
            let number = hook::find(name.as_bytes()).unwrap().0;
            assert_eq!(of_call(number, &arguments), bytes, "{name}");
        }
        assert_eq!(of_call(hook::UNLISTED, &arguments), 0);
    }
}
