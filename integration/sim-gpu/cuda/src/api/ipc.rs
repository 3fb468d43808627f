//! Driver functions of legacy IPC. The 64 bytes of a handle contain a token, by which the daemon
//! finds the memory.

use affinode_sim_protocol::{Reply, Request};

use crate::abi::{CUdeviceptr, INVALID_CONTEXT, INVALID_VALUE, IpcMemHandle, Out, UNKNOWN};
use crate::api::cuda_api;
use crate::memory::{Origin, Source};

/// The driver's constant `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

cuda_api! {
    Work 4010 fn cuIpcGetMemHandle(handle: Out<IpcMemHandle>, address: CUdeviceptr) |d, _z| {
        let found = d.memory().describe(address).filter(|found| found.origin == Origin::Alloc).ok_or(INVALID_VALUE)?;
        let (Reply::Token(token), _) = d.link.ask(&Request::IpcExport { object: found.object }, None)? else {
            return Err(UNKNOWN);
        };
        let mut bytes = [0u8; 64];
        for (place, byte) in bytes.iter_mut().zip(token.bytes()) {
            *place = byte;
        }
        handle.set(IpcMemHandle(bytes))
    }
    Work 11000 fn cuIpcOpenMemHandle_v2(address: Out<CUdeviceptr>, handle: IpcMemHandle, flags: u32) |d, _z| {
        let current = d.current()?;
        if flags != LAZY_ENABLE_PEER_ACCESS {
            return Err(INVALID_VALUE);
        }
        let text = handle.0.split(|byte| *byte == 0).next().unwrap_or_default();
        let token = std::str::from_utf8(text).map_err(|_| INVALID_VALUE)?.to_owned();
        let granted = d.link.obtain(&Request::IpcOpen { token }, None)?;
        let mut memory = d.memory();
        if memory.owns(granted.object) {
            // As with the real driver, a process cannot open a handle that it has made itself.
            return Err(INVALID_CONTEXT);
        }
        if let Some(known) = memory.opened_again(granted.object, current.context) {
            return address.set(known);
        }
        memory.add(&granted, Source::LegacyIpc)?;
        address.set(memory.place(granted.object, granted.bytes as usize, current.context, Origin::Ipc)?)
    }
    Work 4010 fn cuIpcCloseMemHandle(address: CUdeviceptr) |d, _z| {
        d.streams.wait_idle(None, None);
        let freed = d.memory().close(address)?;
        freed.map_or(Ok(()), |object| d.link.tell(&Request::Free { object }))
    }
}
