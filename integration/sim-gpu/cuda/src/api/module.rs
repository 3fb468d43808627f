//! Driver functions that load modules and launch kernels.

use std::ffi::c_char;

use crate::abi::{
    CUdeviceptr, Handle, HostAddress, INVALID_IMAGE, INVALID_VALUE, In, LaunchConfig, NOT_FOUND,
    Out, Outcome, Text, pointer,
};
use crate::api::cuda_api;
use crate::contexts::Default0;
use crate::driver::Driver;
use crate::kernels::{Arguments, ptx_entries};

cuda_api! {
    Work 2000 fn cuModuleLoadData(module: Out<Handle>, image: In<c_char>) |d, _z| { load(d, module, image) }
    Work 2010 fn cuModuleLoadDataEx(module: Out<Handle>, image: In<c_char>, _count: u32, _options: usize, _values: usize) |d, _z| {
        load(d, module, image)
    }
    Work 2000 fn cuModuleLoadFatBinary(module: Out<Handle>, image: In<c_char>) |d, _z| { load(d, module, image) }
    Work 2000 fn cuModuleUnload(module: Handle) |d, _z| { d.modules().unload(module) }
    Work 2000 fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) |d, _z| {
        function.set(d.modules().function(module, name.get()?)?)
    }
    Work 3020 fn cuModuleGetGlobal_v2(_address: Out<CUdeviceptr>, _bytes: Out<usize>, module: Handle, name: Text) |d, _z| {
        name.get()?;
        d.modules().check(module)?;
        Err(NOT_FOUND)
    }
    Instant 11070 fn cuModuleGetLoadingMode(mode: Out<u32>) |_d, _z| { mode.set(1) }
    Instant 2020 fn cuFuncGetAttribute(value: Out<i32>, attribute: u32, function: Handle) |d, _z| {
        d.modules().kernel(function)?;
        // Threads per block, PTX version and binary version. All other attributes are 0.
        value.set(match attribute {
            0 => 1024,
            5 | 6 => 90,
            _ => 0,
        })
    }
    Instant 9000 fn cuFuncSetAttribute(function: Handle, _attribute: u32, _value: i32) |d, _z| {
        d.modules().kernel(function).map(drop)
    }
    Work 4000 fn [cuLaunchKernel cuLaunchKernel_ptsz] (
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: Handle,
        parameters: In<HostAddress>, extra: In<HostAddress>
    ) |d, zero| {
        launch(d, function, &[gx, gy, gz, bx, by, bz], stream, parameters, extra, zero)
    }
    Work 11060 fn [cuLaunchKernelEx cuLaunchKernelEx_ptsz] (
        config: In<LaunchConfig>, function: Handle, parameters: In<HostAddress>, extra: In<HostAddress>
    ) |d, zero| {
        let config = config.get().ok_or(INVALID_VALUE)?;
        let [gx, gy, gz] = config.grid;
        let [bx, by, bz] = config.block;
        launch(d, function, &[gx, gy, gz, bx, by, bz], config.stream, parameters, extra, zero)
    }
}

/// Loads a module from an image whose length the caller does not pass. A PTX text ends with a zero
/// byte. All other images begin with bytes that are not text.
fn load(driver: &Driver, module: Out<Handle>, image: In<c_char>) -> Outcome {
    const MAX_PTX_BYTES: usize = 16 << 20;
    driver.current()?;
    let first = image.get().ok_or(INVALID_VALUE)? as u8;
    let entries = if first.is_ascii_whitespace() || first == b'.' || first == b'/' {
        find_compiler();
        let text = (0..MAX_PTX_BYTES)
            .map_while(|index| image.at(index).map(|byte| byte as u8).filter(|byte| *byte != 0));
        let text = String::from_utf8(text.collect()).map_err(|_| INVALID_IMAGE)?;
        Some(ptx_entries(&text).ok_or(INVALID_IMAGE)?)
    } else {
        None
    };
    module.set(driver.modules().load(entries))
}

/// Acquires and releases the dynamic loader's lock. The real driver does the same when it loads its
/// compiler for a PTX image.
fn find_compiler() {
    // SAFETY: the name ends with a zero byte, and with RTLD_NOLOAD the call loads no library.
    unsafe {
        libc::dlopen(c"libnvidia-ptxjitcompiler.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD)
    };
}

fn launch(
    driver: &'static Driver,
    function: Handle,
    shape: &[u32],
    stream: Handle,
    parameters: In<HostAddress>,
    extra: In<HostAddress>,
    zero: Default0,
) -> Outcome {
    if shape.contains(&0) {
        return Err(INVALID_VALUE);
    }
    let kernel = driver.modules().kernel(function)?;
    let call = kernel.bind(arguments(parameters, extra)?)?;
    let stream = driver.stream(stream, zero)?;
    driver.submit_kernel(stream, driver.stream_gpu(stream)?, Box::new(move || call.run(driver)))
}

/// Determines where the arguments of a kernel launch are: in `kernelParams`, or in the pairs of
/// `extra` (1: buffer, 2: pointer to its size, 0: end).
fn arguments(parameters: In<HostAddress>, extra: In<HostAddress>) -> Outcome<Arguments> {
    if parameters.get().is_some() {
        return Ok(Arguments::Pointers(parameters.address()));
    }
    let (mut buffer, mut bytes) = (0, 0);
    for pair in 0..2 {
        match extra.at(pair * 2) {
            Some(1) => buffer = extra.at(pair * 2 + 1).ok_or(INVALID_VALUE)?,
            Some(2) => {
                let size = extra.at(pair * 2 + 1).ok_or(INVALID_VALUE)?;
                // SAFETY: the application promises that the second pointer of this pair points to a
                // size_t.
                bytes = unsafe { pointer::<usize>(size) }.get().ok_or(INVALID_VALUE)?;
            }
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(Arguments::Buffer(buffer, bytes))
}
