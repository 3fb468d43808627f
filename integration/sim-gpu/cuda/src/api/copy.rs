//! Driver functions that copy and fill memory.
//!
//! A synchronous copy is complete when the call returns. As on a real GPU, an asynchronous copy
//! from pageable host memory reads its source during the call, and a copy to pageable host memory
//! waits until it is complete.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::abi::{CUdeviceptr, Handle, HostAddress, ILLEGAL_ADDRESS, INVALID_VALUE, Outcome};
use crate::api::cuda_api;
use crate::chunks::{Piece, copy_pieces, each_word, host_piece, snapshot};
use crate::contexts::Default0;
use crate::driver::Driver;
use crate::streams::Mark;

cuda_api! {
    Work 4000 fn [cuMemcpy cuMemcpy_ptds] (to: u64, from: u64, bytes: usize) |d, zero| { copy_any(d, to, from, bytes, zero) }
    Work 4000 fn [cuMemcpyAsync cuMemcpyAsync_ptsz] (to: u64, from: u64, bytes: usize, stream: Handle) |d, zero| {
        copy_any_async(d, to, from, bytes, stream, zero)
    }
    Work 3020 fn [cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, from: HostAddress, bytes: usize) |d, zero| {
        device_or_managed(d, to, bytes)?;
        copy_any(d, to, from as u64, bytes, zero)
    }
    Work 3020 fn [cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds] (to: HostAddress, from: CUdeviceptr, bytes: usize) |d, zero| {
        device_or_managed(d, from, bytes)?;
        copy_any(d, to as u64, from, bytes, zero)
    }
    Work 3020 fn [cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize) |d, zero| {
        device_or_managed(d, to, bytes)?;
        device_or_managed(d, from, bytes)?;
        copy_any(d, to, from, bytes, zero)
    }
    Work 3020 fn [cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz] (to: CUdeviceptr, from: HostAddress, bytes: usize, stream: Handle) |d, zero| {
        device_or_managed(d, to, bytes)?;
        copy_any_async(d, to, from as u64, bytes, stream, zero)?;
        if is_spoilt(bytes) { fill(d, to, WRONG, WRONG.len(), stream, zero) } else { Ok(()) }
    }
    Work 3020 fn [cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz] (to: HostAddress, from: CUdeviceptr, bytes: usize, stream: Handle) |d, zero| {
        device_or_managed(d, from, bytes)?;
        if let Some(file) = held_until(bytes) {
            d.streams.submit(d.stream(stream, zero)?, Box::new(|| wait_for(file)))?;
        }
        copy_any_async(d, to as u64, from, bytes, stream, zero)
    }
    Work 3020 fn [cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz] (to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: Handle) |d, zero| {
        device_or_managed(d, to, bytes)?;
        device_or_managed(d, from, bytes)?;
        copy_any_async(d, to, from, bytes, stream, zero)
    }
    Work 4000 fn [cuMemcpyPeer cuMemcpyPeer_ptds] (to: CUdeviceptr, to_context: Handle, from: CUdeviceptr, from_context: Handle, bytes: usize) |d, zero| {
        both_contexts(d, to_context, from_context)?;
        device_or_managed(d, to, bytes)?;
        device_or_managed(d, from, bytes)?;
        copy_any(d, to, from, bytes, zero)
    }
    Work 4000 fn [cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz] (to: CUdeviceptr, to_context: Handle, from: CUdeviceptr, from_context: Handle, bytes: usize, stream: Handle) |d, zero| {
        both_contexts(d, to_context, from_context)?;
        device_or_managed(d, to, bytes)?;
        device_or_managed(d, from, bytes)?;
        copy_any_async(d, to, from, bytes, stream, zero)
    }
    Work 3020 fn [cuMemsetD8_v2 cuMemsetD8_v2_ptds] (to: CUdeviceptr, value: u8, count: usize) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, 0, zero)
    }
    Work 3020 fn [cuMemsetD16_v2 cuMemsetD16_v2_ptds] (to: CUdeviceptr, value: u16, count: usize) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, 0, zero)
    }
    Work 3020 fn [cuMemsetD32_v2 cuMemsetD32_v2_ptds] (to: CUdeviceptr, value: u32, count: usize) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, 0, zero)
    }
    Work 3020 fn [cuMemsetD8Async cuMemsetD8Async_ptsz] (to: CUdeviceptr, value: u8, count: usize, stream: Handle) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, stream, zero)
    }
    Work 3020 fn [cuMemsetD16Async cuMemsetD16Async_ptsz] (to: CUdeviceptr, value: u16, count: usize, stream: Handle) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, stream, zero)
    }
    Work 3020 fn [cuMemsetD32Async cuMemsetD32Async_ptsz] (to: CUdeviceptr, value: u32, count: usize, stream: Handle) |d, zero| {
        fill(d, to, value.to_ne_bytes(), count, stream, zero)
    }
}

/// Returns the memory behind a range of device or managed addresses. An invalid range is an error
/// when the copy is called, not later on its stream, as with the real driver.
fn device_or_managed(driver: &Driver, address: CUdeviceptr, bytes: usize) -> Outcome<Vec<Piece>> {
    let memory = driver.memory();
    match memory.device(address, bytes) {
        Err(ILLEGAL_ADDRESS) => {
            let (base, size, _) =
                memory.host.describe(address as HostAddress).ok_or(INVALID_VALUE)?;
            let inside =
                (address as usize - base).checked_add(bytes).is_some_and(|end| end <= size);
            if inside { host_piece(address as HostAddress, bytes) } else { Err(INVALID_VALUE) }
        }
        other => other,
    }
}

fn both_contexts(driver: &Driver, to: Handle, from: Handle) -> Outcome {
    let contexts = driver.contexts();
    contexts.find(to)?;
    contexts.find(from).map(drop)
}

fn either(driver: &Driver, address: u64, bytes: usize) -> Outcome<Vec<Piece>> {
    driver.memory().any(address, bytes).map_err(|_| INVALID_VALUE)
}

fn copy_any(driver: &'static Driver, to: u64, from: u64, bytes: usize, zero: Default0) -> Outcome {
    let mark = queue(driver, either(driver, to, bytes)?, either(driver, from, bytes)?, 0, zero)?;
    driver.streams.wait(mark)
}

fn copy_any_async(
    driver: &'static Driver,
    to: u64,
    from: u64,
    bytes: usize,
    stream: Handle,
    zero: Default0,
) -> Outcome {
    let (target, source) = (either(driver, to, bytes)?, either(driver, from, bytes)?);
    let source = if is_pageable(driver, from) { snapshot(&source)? } else { source };
    let mark = queue(driver, target, source, stream, zero)?;
    if is_pageable(driver, to) { driver.streams.wait(mark) } else { Ok(()) }
}

fn is_pageable(driver: &Driver, address: u64) -> bool {
    let memory = driver.memory();
    memory.describe(address).is_none() && memory.host.describe(address as HostAddress).is_none()
}

fn queue(
    driver: &'static Driver,
    to: Vec<Piece>,
    from: Vec<Piece>,
    stream: Handle,
    zero: Default0,
) -> Outcome<Mark> {
    let stream = driver.stream(stream, zero)?;
    let copy = move || {
        copy_pieces(&to, &from);
        Ok(())
    };
    driver.streams.submit(stream, Box::new(copy))
}

/// Value that a faulty copy writes to the first byte of its destination.
const WRONG: [u8; 1] = [0xb5];

/// Size from which a copy counts as large.
const LARGE_BYTES: usize = 1 << 20;

/// The file for which this copy to the host must wait. The environment variable
/// `AFFINODE_SIM_HOLD_COPY` contains the number of the copy, counted from 1 among the large copies,
/// and the path of the file.
fn held_until(bytes: usize) -> Option<&'static Path> {
    static HELD: LazyLock<Option<(u64, PathBuf)>> = LazyLock::new(|| {
        let text = std::env::var("AFFINODE_SIM_HOLD_COPY").ok()?;
        let (which, path) = text.split_once(':')?;
        Some((which.parse().ok()?, path.into()))
    });
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let (which, path) = HELD.as_ref()?;
    let is_held = bytes >= LARGE_BYTES && SEEN.fetch_add(1, Ordering::Relaxed) + 1 == *which;
    is_held.then_some(path.as_path())
}

fn wait_for(file: &Path) -> Outcome {
    while !file.exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether this copy to the device must write wrong contents. The environment variable
/// `AFFINODE_SIM_SPOIL_COPY` selects one copy by its number, counted from 1 among the large copies.
fn is_spoilt(bytes: usize) -> bool {
    static WHICH: LazyLock<u64> = LazyLock::new(|| {
        std::env::var("AFFINODE_SIM_SPOIL_COPY").map_or(0, |which| which.parse().unwrap_or(0))
    });
    static SEEN: AtomicU64 = AtomicU64::new(0);
    bytes >= LARGE_BYTES && *WHICH != 0 && SEEN.fetch_add(1, Ordering::Relaxed) + 1 == *WHICH
}

fn fill<const W: usize>(
    d: &'static Driver,
    to: u64,
    value: [u8; W],
    count: usize,
    stream: Handle,
    zero: Default0,
) -> Outcome {
    if !to.is_multiple_of(W as u64) {
        return Err(INVALID_VALUE);
    }
    let pieces = device_or_managed(d, to, count.checked_mul(W).ok_or(INVALID_VALUE)?)?;
    let stream = d.stream(stream, zero)?;
    let work = move || {
        each_word::<W>(&pieces, |_| value);
        Ok(())
    };
    d.streams.submit(stream, Box::new(work)).map(drop)
}
