//! NVML functions for devices and the processes on them.

use std::ffi::c_char;
use std::time::{SystemTime, UNIX_EPOCH};

use affinode_sim_protocol::{In, MemoryLimit, Out, ProcessUse, Text, uuid_text};

use crate::node::{Device, fixed_text, gpu, gpus, index, limit_memory, put, put_text};
use crate::{
    ARGUMENT_VERSION_MISMATCH, FUNCTION_NOT_FOUND, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND,
    NOT_SUPPORTED, Outcome, nvml_api,
};

/// NVML's C type `nvmlMemory_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// NVML's C type `nvmlMemory_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MemoryV2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Utilization {
    gpu: u32,
    memory: u32,
}

/// NVML's C type `nvmlProcessInfo_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ProcessInfoV1 {
    pid: u32,
    used_bytes: u64,
}

/// NVML's C type `nvmlProcessInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ProcessInfo {
    pid: u32,
    used_bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// NVML's C type `nvmlProcessUtilizationSample_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UtilizationSample {
    pid: u32,
    timestamp_us: u64,
    sm: u32,
    memory: u32,
    encoder: u32,
    decoder: u32,
}

/// NVML's C type `nvmlPciInfo_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PciInfo {
    legacy: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    text: [c_char; 32],
}

/// NVML's C type `nvmlSetMemoryLimits_v1_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct SetMemoryLimits {
    cgroup: Text,
    soft_bytes: u64,
    hard_bytes: u64,
}

const NO_INSTANCE: u32 = u32::MAX;

nvml_api! {
    fn [nvmlDeviceGetHandleByIndex nvmlDeviceGetHandleByIndex_v2] (number: u32, device: Out<Device>) {
        let found = number as Device + 1;
        gpu(found)?;
        put(device, found)
    }
    fn nvmlDeviceGetHandleByUUID(uuid: Text, device: Out<Device>) {
        let uuid = uuid.get().map_err(|_| INVALID_ARGUMENT)?;
        let number = gpus()?.iter().position(|gpu| uuid_text(&gpu.info.uuid) == uuid).ok_or(NOT_FOUND)?;
        put(device, number + 1)
    }
    fn [nvmlDeviceGetHandleByPciBusId nvmlDeviceGetHandleByPciBusId_v2] (id: Text, device: Out<Device>) {
        let id = id.get().map_err(|_| INVALID_ARGUMENT)?.to_uppercase();
        let number = (0..gpus()?.len()).find(|number| bus_id(*number).ends_with(&id)).ok_or(NOT_FOUND)?;
        put(device, number + 1)
    }
    fn nvmlDeviceGetUUID(device: Device, text: Out<c_char>, room: u32) { put_text(text, room, &uuid_text(&gpu(device)?.info.uuid)) }
    fn nvmlDeviceGetName(device: Device, text: Out<c_char>, room: u32) { put_text(text, room, &gpu(device)?.info.name) }
    fn nvmlDeviceGetIndex(device: Device, number: Out<u32>) {
        gpu(device)?;
        put(number, index(device)? as u32)
    }
    fn nvmlDeviceGetMinorNumber(device: Device, number: Out<u32>) {
        gpu(device)?;
        put(number, index(device)? as u32)
    }
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: Out<Memory>) {
        let gpu = gpu(device)?;
        let total = gpu.info.vram_bytes;
        put(memory, Memory { total, free: total - gpu.used_bytes.min(total), used: gpu.used_bytes })
    }
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: Out<MemoryV2>) {
        let version = size_of::<MemoryV2>() as u32 | 2 << 24;
        if memory.cast::<u32>().get() != Some(version) {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        let gpu = gpu(device)?;
        let total = gpu.info.vram_bytes;
        put(memory, MemoryV2 { version, total, reserved: 0, free: total - gpu.used_bytes.min(total), used: gpu.used_bytes })
    }
    fn nvmlDeviceSetMemoryLimits_v1(device: Device, limits: In<SetMemoryLimits>) {
        if !gpu(device)?.info.memory_limits {
            return Err(FUNCTION_NOT_FOUND);
        }
        let limits = limits.get().ok_or(INVALID_ARGUMENT)?;
        limit_memory(MemoryLimit {
            gpu: index(device)?,
            cgroup: limits.cgroup.get().map_err(|_| INVALID_ARGUMENT)?.into(),
            soft_bytes: limits.soft_bytes,
            hard_bytes: limits.hard_bytes,
        })
    }
    fn nvmlDeviceGetUtilizationRates(device: Device, rates: Out<Utilization>) {
        let busy = gpu(device)?.busy_percent;
        put(rates, Utilization { gpu: busy, memory: busy / 2 })
    }
    fn nvmlDeviceGetComputeRunningProcesses(device: Device, count: Out<u32>, processes: Out<ProcessInfoV1>) {
        let info = |process: &ProcessUse| ProcessInfoV1 { pid: process.pid, used_bytes: process.used_bytes };
        list(gpu(device)?.processes.iter().map(info).collect(), count, processes)
    }
    fn [nvmlDeviceGetComputeRunningProcesses_v2 nvmlDeviceGetComputeRunningProcesses_v3] (device: Device, count: Out<u32>, processes: Out<ProcessInfo>) {
        let info = |process: &ProcessUse| ProcessInfo {
            pid: process.pid,
            used_bytes: process.used_bytes,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        };
        list(gpu(device)?.processes.iter().map(info).collect(), count, processes)
    }
    fn [nvmlDeviceGetGraphicsRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses_v3] (device: Device, count: Out<u32>, processes: Out<ProcessInfo>) {
        gpu(device)?;
        list(Vec::new(), count, processes)
    }
    fn nvmlDeviceGetProcessUtilization(device: Device, samples: Out<UtilizationSample>, count: Out<u32>, after_us: u64) {
        let gpu = gpu(device)?;
        if gpu.info.mig {
            return Err(NOT_SUPPORTED);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let sample = |process: &ProcessUse| UtilizationSample {
            pid: process.pid,
            timestamp_us: now,
            sm: process.busy_percent,
            memory: process.busy_percent / 2,
            encoder: 0,
            decoder: 0,
        };
        // As with the real NVML, only busy processes have a sample. All samples have the present
        // time as their time stamp.
        let busy: Vec<_> = gpu.processes.iter().filter(|p| p.busy_percent > 0).map(sample).collect();
        if busy.is_empty() || after_us >= now {
            return Err(NOT_FOUND);
        }
        list(busy, count, samples)
    }
    fn [nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo_v3] (device: Device, info: Out<PciInfo>) {
        gpu(device)?;
        let number = index(device)?;
        put(info, PciInfo {
            legacy: fixed_text(&bus_id(number)[4..]),
            domain: 0,
            bus: number as u32 + 1,
            device: 0,
            device_id: 0x2335_10de,
            subsystem_id: 0,
            text: fixed_text(&bus_id(number)),
        })
    }
    fn nvmlDeviceGetPersistenceMode(device: Device, enabled: Out<u32>) {
        gpu(device)?;
        put(enabled, 1)
    }
    fn nvmlDeviceGetComputeMode(device: Device, mode: Out<u32>) {
        gpu(device)?;
        put(mode, 0)
    }
    fn nvmlDeviceGetCudaComputeCapability(device: Device, major: Out<i32>, minor: Out<i32>) {
        gpu(device)?;
        put(major, 9)?;
        put(minor, 0)
    }
    fn nvmlDeviceGetMigMode(device: Device, current: Out<u32>, pending: Out<u32>) {
        if !gpu(device)?.info.mig {
            return Err(NOT_SUPPORTED);
        }
        put(current, 1)?;
        put(pending, 1)
    }
}

fn bus_id(number: usize) -> String {
    format!("00000000:{:02X}:00.0", number + 1)
}

/// Writes items to an array of the caller, and their number to `count`. When the function is
/// called, `count` contains the size of the array. If the array is too small, no item is written
/// and the function returns an error.
fn list<T>(items: Vec<T>, count: Out<u32>, to: Out<T>) -> Outcome {
    let room = count.get().ok_or(INVALID_ARGUMENT)?;
    let there = items.len() as u32;
    put(count, there)?;
    if there > room {
        return Err(INSUFFICIENT_SIZE);
    }
    let mut items = items.into_iter().enumerate();
    items.try_for_each(|(index, item)| to.set_at(index, item)).map_err(|_| INVALID_ARGUMENT)
}
