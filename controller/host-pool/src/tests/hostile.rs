//! Tests of processes that do not follow the protocol.

use super::*;

#[test]
fn an_invalid_packet_ends_only_its_connection() {
    let pool = TestPool::strict();
    let other = pool.attach(8);
    pool.allow_now(8, 4 * MIB);
    let request = ToHostPool::Populate { offset: 0, bytes: MIB, processor: 0 }.encode();
    let long = [&request[..], &[0]].concat();
    let garbage: [&[u8]; 4] = [&[7; FRAME_BYTES], &request[..FRAME_BYTES - 1], &[], &long];
    for packet in garbage {
        let agent = pool.attach(7);
        rustix::net::send(&agent.socket, packet, rustix::net::SendFlags::NOSIGNAL).unwrap();
        agent.expect_end();
    }
    // A descriptor does not end the connection, and is not kept.
    let agent = pool.attach(7);
    let (ours, theirs) = pair();
    let request = ToHostPool::Populate { offset: 0, bytes: MIB, processor: u32::MAX }.encode();
    socket::send(&agent.socket, &request, Some(&theirs)).unwrap();
    drop(theirs);
    assert_eq!(socket::receive(&ours).unwrap(), None, "the descriptor is still open");
    assert_eq!(agent.reply(), (0, false));
    assert!(other.populate(0, 4 * MIB));
}

#[test]
fn a_process_with_many_requests_gets_all_replies() {
    let pool = TestPool::strict();
    let (agent, other) = (pool.attach(7), pool.attach(8));
    pool.allow_now(7, 256 * MIB);
    pool.allow_now(8, 2 * MIB);
    let requests = 4 * MAX_PENDING as u64;
    for number in 0..requests {
        agent.ask(number * 2 * MIB, 2 * MIB);
    }
    assert!(other.populate(0, 2 * MIB));
    let mut replies: Vec<_> = (0..requests).map(|_| agent.reply()).collect();
    replies.sort_unstable();
    let expected: Vec<_> = (0..requests).map(|number| (number * 2 * MIB, true)).collect();
    assert_eq!(replies, expected);
}

#[test]
fn process_that_reads_no_reply_is_disconnected() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    let request = ToHostPool::Populate { offset: 1, bytes: 1, processor: 0 }.encode();
    let since = Instant::now();
    // Until the host pool has closed the socket, it may also be full.
    let ended = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
    while !socket::send(&agent.socket, &request, None::<OwnedFd>).is_err_and(|e| ended(&e)) {
        assert!(since.elapsed() < TOO_LONG);
    }
    pool.end().unwrap();
}

#[test]
fn an_invalid_order_ends_the_host_pool() {
    let pool = TestPool::strict();
    let agent = pool.attach(7);
    socket::send(&pool.controller, &[0; FRAME_BYTES], None::<OwnedFd>).unwrap();
    assert!(matches!(pool.end(), Err(HostPoolError::Frame(_))));
    agent.expect_end();
}

/// Memory that one process filled and freed is given to others. They must find zeros in it,
/// whichever way the first process freed it.
#[test]
fn no_process_reads_content_of_another() {
    const BYTES: u64 = 64 * MIB;
    const STEP: usize = 512;
    let pool = TestPool::strict();
    let reader = pool.attach(1);
    pool.allow_now(1, BYTES);
    let fill = |owner: &Agent| {
        assert!(owner.populate(0, BYTES));
        let mapping = Mapping::new(&owner.file, 0, BYTES as usize).unwrap();
        (0..BYTES as usize).step_by(STEP).for_each(|at| mapping.set(at, 0xa5));
    };
    let read = |how: &str| {
        assert!(reader.populate(0, BYTES));
        let mapping = Mapping::new(&reader.file, 0, BYTES as usize).unwrap();
        let found = (0..BYTES as usize).step_by(STEP).find(|at| mapping.get(*at) != 0);
        assert_eq!(found, None, "{how}: an earlier content is readable");
        reader.free(0, BYTES);
    };
    read("a new file");
    for round in 2..5 {
        let owner = pool.attach(round);
        pool.allow_now(round, BYTES);
        fill(&owner);
        owner.free(0, BYTES);
        read("freed by its owner");
        fill(&owner);
        // The same process connects again, for example after a restart of the controller.
        let next = pool.attach(round);
        pool.allow_now(round, 2 * BYTES);
        assert!(next.populate(0, BYTES));
        let mapping = Mapping::new(&next.file, 0, BYTES as usize).unwrap();
        assert!((0..BYTES as usize).step_by(STEP).all(|at| mapping.get(at) == 0), "a new file");
        drop((owner, mapping, next));
        read("its owner has ended");
    }
    pool.end().unwrap();
}

/// A process that connects again and again, and keeps its earlier files, gets no more memory in total
/// than it is allowed. The content of the earlier files stays.
#[test]
fn ended_files_count_for_their_container() {
    const BYTES: u64 = 8 * MIB;
    let pool = TestPool::strict();
    let first = pool.attach_to(1, 7);
    pool.allow_now(7, BYTES);
    assert!(first.populate(0, BYTES - 2 * MIB));
    // The process registers again with the controller, which gives it another number.
    pool.order(HostPoolOrder::Detach { process: 7 }, None);
    first.expect_end();
    let second = pool.attach_to(1, 8);
    pool.allow_now(8, BYTES);
    assert!(second.populate(0, 2 * MIB), "the rest of what the container may use");
    assert!(!second.populate(2 * MIB, 2 * MIB));
    assert_eq!(first.allocated_bytes(), BYTES - 2 * MIB);
    let other = pool.attach_to(2, 9);
    pool.allow_now(9, BYTES);
    assert!(other.populate(0, BYTES), "another container");
    drop(first);
    assert!(second.populate(0, BYTES), "the earlier file is closed");
    pool.end().unwrap();
}

/// A process that keeps a page in each of its earlier files gets no more files at last, so that the
/// host pool has descriptors for others.
#[test]
fn number_of_ended_files_is_limited() {
    let pool = TestPool::strict();
    let kept: Vec<Agent> = (0..64)
        .map(|process| {
            let agent = pool.attach_to(1, process);
            pool.allow_now(process, 512 * MIB);
            assert!(agent.populate(0, 4096));
            pool.order(HostPoolOrder::Detach { process }, None);
            agent.expect_end();
            agent
        })
        .collect();
    let (socket, theirs) = pair();
    pool.order(HostPoolOrder::Attach { process: 99, container: 1 }, Some(&theirs));
    drop(theirs);
    assert!(socket::receive_with_descriptor(&socket).unwrap().is_none(), "no file is sent");
    drop(pool.attach_to(2, 99));
    drop(kept);
    drop(pool.attach_to(1, 99));
    pool.end().unwrap();
}
