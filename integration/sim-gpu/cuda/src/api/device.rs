//! `cuInit`, the driver's version, and the functions that list and describe devices.

use std::ffi::c_char;

use crate::abi::{CUdevice, INVALID_VALUE, In, Out, Outcome, Text, Uuid};
use crate::api::cuda_api;
use crate::driver::{self, Driver};
use affinode_sim_protocol::{CUDA_VERSION, THREADS};

use crate::gate::Class;
use crate::tables::{self, Table};

cuda_api! {
    Always 2000 fn cuInit(flags: u32) |_d, _z| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        // A further call of `cuInit` waits while the process is checkpointed, as other work does.
        driver::init()?.gate.enter(Class::Work).map(drop)
    }
    Always 2020 fn cuDriverGetVersion(version: Out<i32>) |_d, _z| { version.set(CUDA_VERSION) }
    Instant 2000 fn cuDeviceGetCount(count: Out<i32>) |d, _z| { count.set(d.device_count() as i32) }
    Instant 2000 fn cuDeviceGet(device: Out<CUdevice>, ordinal: i32) |d, _z| {
        d.gpu(ordinal)?;
        device.set(ordinal)
    }
    // Returns 304 while the process is checkpointed, as measured on a real driver.
    MemInfo 2000 fn cuDeviceGetName(name: Out<c_char>, length: i32, device: CUdevice) |d, _z| {
        write_text(name, length, &d.info(device)?.name)
    }
    Instant 9020 fn cuDeviceGetUuid(uuid: Out<Uuid>, device: CUdevice) |d, _z| { uuid.set(d.info(device)?.uuid) }
    Instant 11040 fn cuDeviceGetUuid_v2(uuid: Out<Uuid>, device: CUdevice) |d, _z| { uuid.set(d.info(device)?.uuid) }
    Instant 3020 fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) |d, _z| {
        bytes.set(d.info(device)?.vram_bytes as usize)
    }
    Instant 2000 fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: CUdevice) |d, _z| {
        value.set(attribute_of(d, attribute, device)?)
    }
    Instant 4010 fn cuDeviceGetPCIBusId(id: Out<c_char>, length: i32, device: CUdevice) |d, _z| {
        write_text(id, length, &format!("0000:{:02X}:00.0", d.gpu(device)? + 1))
    }
    Instant 4010 fn cuDeviceGetByPCIBusId(device: Out<CUdevice>, id: Text) |d, _z| {
        let id = id.get()?.to_uppercase();
        let same = |ordinal: &i32| d.gpu(*ordinal).is_ok_and(|gpu| format!("0000:{:02X}:00.0", gpu + 1).ends_with(&id));
        device.set((0..d.device_count() as i32).find(same).ok_or(INVALID_VALUE)?)
    }
    Instant 4000 fn cuDeviceCanAccessPeer(can: Out<i32>, device: CUdevice, peer: CUdevice) |d, _z| {
        d.gpu(device)?;
        d.gpu(peer)?;
        can.set(i32::from(device != peer))
    }
    Instant 8000 fn cuDeviceGetP2PAttribute(value: Out<i32>, attribute: i32, device: CUdevice, peer: CUdevice) |d, _z| {
        d.gpu(device)?;
        d.gpu(peer)?;
        // Attribute 2 (access is supported) is 1 for another device. All other attributes are 0.
        value.set(i32::from(attribute == 2 && device != peer))
    }
    Always 2000 fn cuGetExportTable(table: Out<*const Table>, id: In<Uuid>) |_d, _z| {
        table.set(tables::find(&id.get().ok_or(INVALID_VALUE)?))
    }
}

fn write_text(to: Out<c_char>, length: i32, text: &str) -> Outcome {
    let room = usize::try_from(length).ok().filter(|length| *length > 0).ok_or(INVALID_VALUE)?;
    let bytes = text.bytes().take(room - 1).chain([0]);
    for (index, byte) in bytes.enumerate() {
        to.set_at(index, byte as c_char)?;
    }
    Ok(())
}

/// Returns the value of a device attribute: the value of an H200 if applications may depend on the
/// attribute, otherwise 0.
fn attribute_of(driver: &Driver, attribute: i32, device: CUdevice) -> Outcome<i32> {
    let gpu = driver.gpu(device)?;
    Ok(match attribute {
        1 => 1024,                         // max threads per block
        2 | 3 => 1024,                     // max block dimensions x, y
        4 => 64,                           // max block dimension z
        5 => i32::MAX,                     // max grid dimension x
        6 | 7 => 65535,                    // max grid dimensions y, z
        8 => 49152,                        // shared memory per block
        9 => 65536,                        // constant memory
        10 => 32,                          // warp size
        12 => 65536,                       // registers per block
        13 => 1_980_000,                   // processor clock, kHz
        14 => 512,                         // texture alignment
        15 => 1,                           // can overlap copies
        16 => driver.multiprocessors(gpu), // multiprocessors
        18 => 0,                           // not integrated
        19 => 1,                           // can map host memory
        20 => 0,                           // compute mode default
        31 => 1,                           // concurrent kernels
        33 => gpu as i32 + 1,              // PCI bus
        34 | 50 => 0,                      // PCI device, domain
        36 => 3_201_000,                   // memory clock, kHz
        37 => 6144,                        // memory bus width
        38 => 60 << 20,                    // L2 bytes
        39 => THREADS as i32,              // threads per multiprocessor
        40 => 3,                           // copy engines
        41 => 1,                           // unified addressing
        75 => 9,                           // compute capability major
        76 => 0,                           // compute capability minor
        78 => 1,                           // stream priorities
        81 => 233_472,                     // shared memory per multiprocessor
        82 => 65536,                       // registers per multiprocessor
        83 => 1,                           // managed memory
        89 => 1,                           // concurrent managed access
        91 => 1,                           // host pointers for registered memory
        97 => 232_448,                     // opt-in shared memory per block
        102 | 103 => 1,                    // VMM, POSIX descriptors
        110 => 1,                          // VMM memory that other PCI devices can access
        115 => 1,                          // memory pools
        _ if (0..=512).contains(&attribute) => 0,
        _ => return Err(INVALID_VALUE),
    })
}
