use super::*;
use crate::abi::OUT_OF_MEMORY;
use crate::chunks::{copy_pieces, each_word};
use crate::host::HostKind;

fn granted(object: ObjectId, bytes: usize) -> Granted {
    // Any file of this size can serve as device memory.
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes as u64).unwrap();
    let memory = OwnedFd::from(file);
    Granted { object, gpu: 0, bytes: bytes as u64, memory }
}

fn read(memory: &Memory, address: u64, bytes: usize) -> Vec<u8> {
    let buffer = vec![0u8; bytes];
    copy_pieces(
        &host_piece(buffer.as_ptr() as usize, bytes).unwrap(),
        &memory.any(address, bytes).unwrap(),
    );
    buffer
}

#[test]
fn contents_survive_save_and_refill() {
    let mut memory = Memory::default();
    memory.add(&granted(1, 8192), Source::Own).unwrap();
    let address = memory.place(1, 8192, 1, Origin::Alloc).unwrap();
    each_word::<4>(&memory.device(address, 8192).unwrap(), |_| [1, 2, 3, 4]);
    assert_eq!(memory.save(0), Ok(0));
    assert_eq!(memory.device(address, 4).err(), Some(ILLEGAL_ADDRESS));
    memory.refill(1, &granted(1, 8192).memory).unwrap();
    assert_eq!(read(&memory, address + 4096, 4), [1, 2, 3, 4]);
    assert_eq!(memory.remove(address, Origin::Alloc), Ok(Some(1)));
}

#[test]
fn a_range_may_cross_vmm_mappings_but_not_holes() {
    let mut memory = Memory::default();
    memory.add(&granted(1, GRANULARITY), Source::Own).unwrap();
    memory.add(&granted(2, GRANULARITY), Source::Shared).unwrap();
    let base = memory.reserve(3 * GRANULARITY, 0).unwrap();
    memory.map(base, GRANULARITY, 0, 1).unwrap();
    memory.map(base + GRANULARITY as u64, GRANULARITY, 0, 2).unwrap();
    assert_eq!(memory.map(base, GRANULARITY, 0, 2), Err(INVALID_VALUE));
    assert_eq!(memory.device(base, 4).err(), Some(ILLEGAL_ADDRESS), "no access right yet");
    memory.set_access(base, 2 * GRANULARITY, ACCESS_READ_WRITE).unwrap();
    assert_eq!(memory.device(base, 2 * GRANULARITY).unwrap().len(), 2);
    assert!(memory.device(base, 2 * GRANULARITY + 1).is_err());
    assert_eq!(memory.unreserve(base, 3 * GRANULARITY), Err(INVALID_VALUE));
    assert_eq!(memory.save(0), Ok(NOT_SUPPORTED), "memory of another process");
    memory.add(&granted(3, GRANULARITY), Source::LegacyIpc).unwrap();
    assert_eq!(memory.save(0), Ok(INVALID_VALUE), "the same by legacy IPC");
    assert_eq!(memory.drop_handle(1), Ok(false));
    assert_eq!(memory.unmap(base, 2 * GRANULARITY), Ok(vec![1]));
    memory.unreserve(base, 3 * GRANULARITY).unwrap();
}

#[test]
fn managed_memory_forbids_a_save() {
    let mut memory = Memory::default();
    let address = memory.host.add(None, 10, HostKind::Managed).unwrap();
    assert_eq!(memory.save(0), Err(NOT_SUPPORTED));
    memory.host.remove(address, &[HostKind::Managed]).unwrap();
    assert_eq!(memory.save(0), Ok(0));
    assert_eq!(Pages::host(usize::MAX).err(), Some(OUT_OF_MEMORY));
}
