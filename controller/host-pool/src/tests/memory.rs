//! Tests of the allocation of pages and of its limit.

use super::*;

#[test]
fn pages_are_allocated_up_to_the_allowed_amount() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    assert!(!agent.populate(0, MIB), "nothing is allowed yet");
    agent.free(0, MIB);
    pool.allow_now(7, 6 * MIB);
    assert!(agent.populate(0, 4 * MIB));
    assert!(agent.allocated_bytes() >= 4 * MIB);
    let mapping = Mapping::new(&agent.file, 0, 4 << 20).unwrap();
    assert!((0..4 << 20).step_by(4096).all(|at| mapping.get(at) == 0));
    assert!(!agent.populate(4 * MIB, 4 * MIB));
    assert!(agent.allocated_bytes() <= 6 * MIB);
    pool.allow_now(7, 8 * MIB);
    assert!(agent.populate(4 * MIB, 4 * MIB));
    assert!(agent.populate(0, 8 * MIB), "pages that exist need no room");
    pool.end().unwrap();
}

/// A process that reports more memory of an earlier offload than it has may use less by the
/// difference.
#[test]
fn memory_not_kept_reduces_the_allowed_amount() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 4 * MIB);
    assert!(agent.populate(0, 4 * MIB));
    pool.allow_with_now(7, 8 * MIB, 4 * MIB);
    assert!(agent.populate(4 * MIB, 4 * MIB), "it has what it kept");
    agent.free(0, 8 * MIB);
    pool.allow_with_now(7, 8 * MIB, 6 * MIB);
    assert!(!agent.populate(0, 4 * MIB), "nothing is kept");
    assert!(agent.allocated_bytes() <= 2 * MIB);
}

#[test]
fn ranges_beyond_the_allowed_amount_are_refused() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 4 * MIB);
    assert!(agent.populate(2 * MIB, 2 * MIB));
    assert!(!agent.populate(4 * MIB, 4096), "other pages are still missing");
    assert!(!agent.populate((2 << 40) - 4 * MIB, 4 * MIB), "it is far beyond the start");
    assert!(!agent.populate((2 << 40) - 2 * MIB, 4 * MIB), "it is beyond the end");
    assert!(!agent.populate(1, 4096), "it does not begin at a page");
}

#[test]
fn request_waits_for_the_allow_it_overtook() {
    let pool = TestPool::start(TOO_LONG);
    let agent = pool.attach(7);
    agent.ask(0, 4 * MIB);
    let since = Instant::now();
    while pool.pool.parked() == 0 {
        assert!(since.elapsed() < TOO_LONG);
        std::thread::yield_now();
    }
    // A request that waits occupies no worker.
    let other = pool.attach(8);
    pool.allow(8, 2 * MIB);
    assert!(other.populate(0, 2 * MIB));
    pool.allow(7, 4 * MIB);
    assert_eq!(agent.reply(), (0, true));
    assert!(agent.allocated_bytes() >= 4 * MIB);
}

#[test]
fn request_without_room_is_refused_at_last() {
    let pool = TestPool::start(Duration::from_millis(50));
    let agent = pool.attach(7);
    assert!(!agent.populate(0, 4 * MIB));
    assert_eq!(pool.pool.parked(), 0);
}

#[test]
fn freed_pages_make_room() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 4 * MIB);
    // A page that the process has allocated itself counts, wherever it is in the file.
    rustix::io::pwrite(&agent.file, &[1], 8 * MIB).unwrap();
    assert!(!agent.populate(0, 4 * MIB));
    agent.free(0, 16 * MIB);
    assert!(agent.populate(0, 4 * MIB));
    agent.free(0, 4 * MIB);
    assert!(agent.populate(0, 4 * MIB));
}

#[test]
fn detached_process_keeps_its_content_alone() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 4 * MIB);
    assert!(agent.populate(0, 2 * MIB));
    let mapping = Mapping::new(&agent.file, 0, 2 << 20).unwrap();
    mapping.set(5, 9);
    pool.pool.detach(7);
    agent.expect_end();
    assert_eq!((mapping.get(5), agent.allocated_bytes()), (9, 2 * MIB));
}

#[test]
fn allow_of_zero_keeps_pages_but_refuses_more() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 8 * MIB);
    assert!(agent.populate(0, 4 * MIB));
    let mapping = Mapping::new(&agent.file, 0, 4 << 20).unwrap();
    mapping.set(5, 9);
    pool.allow_now(7, 0);
    assert!(!agent.populate(4 * MIB, 2 * MIB));
    assert_eq!((mapping.get(5), agent.allocated_bytes()), (9, 4 * MIB));
    agent.free(2 * MIB, 2 * MIB);
    assert!(!agent.populate(2 * MIB, 2 * MIB), "freed pages cannot be allocated again");
    assert_eq!(mapping.get(5), 9);
    pool.allow_now(7, 4 * MIB);
    assert!(agent.populate(2 * MIB, 2 * MIB));
}

#[test]
fn an_allow_of_an_unknown_process_is_ignored() {
    let pool = TestPool::strict();
    pool.allow(99, MIB);
    pool.attach(7);
    pool.end().unwrap();
}

#[test]
fn the_content_outlives_the_host_pool() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    pool.allow_now(7, 4 * MIB);
    assert!(agent.populate(0, 4 * MIB));
    let mapping = Mapping::new(&agent.file, 0, 4 << 20).unwrap();
    mapping.set(0, 3);
    mapping.set((4 << 20) - 1, 4);
    let Agent { socket, file } = agent;
    drop(file);
    pool.end().unwrap();
    assert_eq!(socket::receive(&socket).unwrap(), None, "the connection has ended");
    assert_eq!((mapping.get(0), mapping.get((4 << 20) - 1)), (3, 4));
}

#[test]
fn process_attached_again_gets_a_new_file() {
    let pool = TestPool::strict();
    let old = pool.attach(7);
    let new = pool.attach(7);
    old.expect_end();
    pool.allow_now(7, 2 * MIB);
    assert!(new.populate(0, 2 * MIB));
    assert_eq!(old.allocated_bytes(), 0);
}
