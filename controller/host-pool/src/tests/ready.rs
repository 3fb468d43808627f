//! Tests of files whose pages are allocated before a process is attached.

use affinode_proto::wire::host_pool::{HostPoolReport, MAX_READY};

use super::*;

impl TestPool {
    fn keep_ready(&self, sizes: &[u64], min_available_bytes: u64) {
        let mut all = [0; MAX_READY];
        all.iter_mut().zip(sizes).for_each(|(to, bytes)| *to = *bytes);
        let max_bytes = 1 << 40;
        let order = HostPoolOrder::KeepReady { sizes: all, min_available_bytes, max_bytes };
        self.order(order, None);
    }

    /// Waits until the host pool reports this memory of the ready files.
    fn expect_ready(&self, expected: u64) {
        loop {
            let frame = socket::receive(&self.controller).unwrap().expect("the host pool ended");
            let HostPoolReport::Ready { bytes } = HostPoolReport::decode(&frame).unwrap();
            if bytes == expected {
                return;
            }
        }
    }
}

#[test]
fn a_process_gets_a_file_with_pages() {
    let pool = TestPool::strict();
    pool.keep_ready(&[48 * MIB], 0);
    pool.expect_ready(48 * MIB);
    let agent = pool.attach_for(7, 48 * MIB);
    assert_eq!(agent.allocated_bytes(), 48 * MIB);
    let mapping = Mapping::new(&agent.file, 0, 48 << 20).unwrap();
    assert!((0..48 << 20).step_by(4096).all(|at| mapping.get(at) == 0));
    pool.allow_now(7, 50 * MIB);
    assert!(agent.populate(0, 50 * MIB));
    assert!(!agent.populate(50 * MIB, 2 * MIB), "it is beyond the allowed amount");
    // The next file is filled meanwhile.
    pool.expect_ready(48 * MIB);
    pool.end().unwrap();
}

#[test]
fn the_smallest_file_that_suffices_is_taken() {
    let pool = TestPool::strict();
    pool.keep_ready(&[16 * MIB, 64 * MIB], 0);
    pool.expect_ready(80 * MIB);
    pool.keep_ready(&[16 * MIB, 64 * MIB], u64::MAX / 2);
    pool.expect_ready(0);
    pool.keep_ready(&[64 * MIB, 16 * MIB], 0);
    pool.expect_ready(80 * MIB);
    let small = pool.attach_for(7, 10 * MIB);
    assert_eq!(small.allocated_bytes(), 10 * MIB, "pages that it does not need are freed");
    let large = pool.attach_for(8, 200 * MIB);
    assert!(large.allocated_bytes() >= 64 * MIB, "a part of its pages is ready");
}

/// A process that frees no pages must not get further memory by a new connection.
#[test]
fn a_file_with_content_is_not_replaced() {
    let pool = TestPool::strict();
    let old = pool.attach(7);
    pool.allow_now(7, 8 * MIB);
    assert!(old.populate(0, 4 * MIB));
    let mapping = Mapping::new(&old.file, 0, 4 << 20).unwrap();
    mapping.set(5, 9);
    pool.keep_ready(&[32 * MIB], 0);
    pool.expect_ready(32 * MIB);
    let new = pool.attach_for(7, 32 * MIB);
    old.expect_end();
    assert_eq!(new.allocated_bytes(), 4 * MIB);
    assert_eq!(Mapping::new(&new.file, 0, 4 << 20).unwrap().get(5), 9);
    // After the process has freed its pages, it gets a file that is ready.
    new.free(0, 4 * MIB);
    assert_eq!(pool.attach_for(7, 32 * MIB).allocated_bytes(), 32 * MIB);
}

/// Ready pages must not use up the memory that an offload was promised.
#[test]
fn ready_pages_make_room_for_an_offload() {
    let pool = TestPool::strict();
    pool.keep_ready(&[32 * MIB], 0);
    pool.expect_ready(32 * MIB);
    let agent = pool.attach(7);
    assert_eq!(agent.allocated_bytes(), 0, "the size of its content is unknown");
    // The pool is full now.
    std::fs::write(pool.cgroup.path().join("memory.current"), format!("{}\n", 1_u64 << 40))
        .unwrap();
    pool.allow(7, 64 * MIB);
    pool.expect_ready(0);
    assert!(agent.populate(0, 64 * MIB), "the kernel has memory");
    pool.end().unwrap();
}
