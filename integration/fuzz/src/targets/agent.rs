//! Fuzz targets for input from an agent (the library's thread in a CUDA process): its counters and
//! its messages.

use affinode_proto::wire::{
    WIRE_VERSION,
    call_ring::{CallRingReader, RECORDS},
    copier::ToCopier,
    counters::{CounterSnapshot, PAGE_BYTES, PAGE_MAGIC, SLOT_COUNT, header},
    host_pool::ToHostPool,
    ipc::{HANDLE_BYTES, IpcHandle, IpcReply, IpcRequest},
    message::{AgentMessage, ControllerMessage, FRAME_BYTES},
};

/// Decodes a page of counters to which random changes were made. Each change uses ten bytes of the
/// input: two for the position in a valid page, and eight for the new content. The input itself is
/// decoded as a page as well, to test pages of other sizes.
pub fn page(data: &[u8]) {
    let _ = CounterSnapshot::decode(data);
    let mut bytes = valid_page();
    for change in data.chunks_exact(10) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % (PAGE_BYTES - 8);
        bytes[at..at + 8].copy_from_slice(&change[2..]);
    }
    if let Some(page) = bytes.first_chunk() {
        // The page is read twice, because the second read completes transfers that the first has
        // begun.
        let mut reader = CallRingReader::default();
        for _ in 0..2 {
            let mut taken = 0;
            reader.take(page, |_| taken += 1);
            assert!(taken <= RECORDS);
        }
    }
    if let Ok(page) = CounterSnapshot::decode(&bytes) {
        assert!(page.inflight <= SLOT_COUNT as u64 * u64::from(u32::MAX));
    }
}

fn valid_page() -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    bytes[header::MAGIC..][..8].copy_from_slice(&PAGE_MAGIC.to_ne_bytes());
    bytes[header::VERSION..][..4].copy_from_slice(&WIRE_VERSION.to_ne_bytes());
    let slots = u32::try_from(SLOT_COUNT).unwrap_or(u32::MAX);
    bytes[header::SLOT_COUNT..][..4].copy_from_slice(&slots.to_ne_bytes());
    bytes
}

/// Decodes message frames of both directions between agent and controller. A decoded frame must
/// encode to the same frame again.
pub fn messages(data: &[u8]) {
    let mut frame = [0; FRAME_BYTES];
    let taken = data.len().min(FRAME_BYTES);
    frame[..taken].copy_from_slice(&data[..taken]);
    if let Ok(message) = AgentMessage::decode(&frame) {
        assert_eq!(AgentMessage::decode(&message.encode()), Ok(message));
    }
    if let Ok(message) = IpcRequest::decode(&frame) {
        assert_eq!(IpcRequest::decode(&message.encode()), Ok(message));
    }
    if let Ok(message) = IpcReply::decode(&frame) {
        assert_eq!(IpcReply::decode(&message.encode()), Ok(message));
    }
    if let Some(bytes) = frame.first_chunk::<HANDLE_BYTES>()
        && let Some(handle) = IpcHandle::decode(bytes)
    {
        assert_eq!(handle.encode(), *bytes);
    }
    if let Ok(message) = ToHostPool::decode(&frame) {
        assert_eq!(ToHostPool::decode(&message.encode()), Ok(message));
    }
    if let Ok(message) = ToCopier::decode(&frame) {
        assert_eq!(ToCopier::decode(&message.encode()), Ok(message));
    }
    if let Ok(message) = ControllerMessage::decode(&frame) {
        assert_eq!(ControllerMessage::decode(&message.encode()), Ok(message));
    }
}
