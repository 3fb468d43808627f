//! Tests of content that is stored once and shared between processes.

use std::{fs::File, os::unix::fs::FileExt};

use rustix::fs::FallocateFlags;

use super::*;

const CHUNK: u64 = crate::sys::CHUNK_BYTES as u64;
const DOMAIN: u64 = 5;

/// Creates two offloaded processes in the given dedup domains. Each has a chunk with the same
/// content as the other process's chunk, and a unit with content of its own.
fn two(testbed: &mut Testbed, domains: [u64; 2]) -> [(Agent, OwnedFd); 2] {
    let common = pattern(CHUNK, 7);
    let both = [1_u64, 2].map(|process| {
        let agent = testbed.attach(process, CHUNK + UNIT, domains[process as usize - 1]);
        let file = content_file(&[&common[..], &pattern(UNIT, process)].concat());
        agent.leave(&pieces(&[CHUNK / UNIT, 1]), 0, &file);
        (agent, file)
    });
    testbed.settle().unwrap();
    both
}

fn give_up(file: &OwnedFd, bytes: u64) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, 0, bytes).unwrap();
}

fn shared_reports(testbed: &mut Testbed) -> Vec<CopierReport> {
    let reports = testbed.take_reports();
    reports.into_iter().filter(|report| matches!(report, CopierReport::Shared { .. })).collect()
}

#[test]
fn common_content_is_offered_and_fills_once() {
    let mut testbed = Testbed::new();
    // A process that never replies must not stop the deduplication of others.
    let _silent = testbed.attach(3, CHUNK, DOMAIN);
    let mut both = two(&mut testbed, [DOMAIN, DOMAIN]);
    for (agent, file) in &mut both {
        let received = agent.received();
        let [(FromCopier::Same { chunk: 0 }, Some(segment))] = &received[..] else {
            panic!("{received:?}");
        };
        assert!(content_of(segment, CHUNK as usize) == content_of(file, CHUNK as usize));
        let written = File::from(segment.try_clone().unwrap()).write_at(&[1], 0);
        assert!(written.is_err(), "an agent can write to what others have");
        give_up(file, CHUNK);
        agent.say(ToCopier::Mapped { chunk: 0, taken: true }, None);
    }
    testbed.take_reports();
    testbed.settle().unwrap();
    let of = |process| CopierReport::Shared { process, bytes: CHUNK, stored_bytes: CHUNK };
    assert_eq!(shared_reports(&mut testbed), [of(1), of(2)]);
    // Freed chunks are no longer registered. The segment and both processes' own units are still
    // registered.
    let units_and_segment = 2 * UNIT + CHUNK;
    assert_eq!(fake::with(|fake| fake.registered_bytes()) as u64, units_and_segment);
    for (agent, _) in &mut both {
        testbed.fill(agent.process, CHUNK + UNIT);
        agent.say(ToCopier::Restoring, None);
        agent.say(ToCopier::Restored, None);
        testbed.settle().unwrap();
        let own = pattern(UNIT, agent.process);
        assert!(content_of_blocks(&agent.received()) == [&pattern(CHUNK, 7)[..], &own].concat());
        agent.hang_up();
        testbed.settle().unwrap();
    }
    assert_eq!(
        shared_reports(&mut testbed).last(),
        Some(&CopierReport::Shared { process: 0, bytes: 0, stored_bytes: 0 })
    );
    testbed.assert_nothing_is_left();
}

#[test]
fn content_is_shared_within_a_domain_only() {
    for domains in [[DOMAIN, DOMAIN + 1], [0, 0]] {
        let mut testbed = Testbed::new();
        for (mut agent, _) in two(&mut testbed, domains) {
            assert_eq!(agent.words(), [], "{domains:?}");
        }
    }
}

#[test]
fn nothing_is_stored_beyond_the_bounds_of_memory() {
    use crate::host_budget::HostBudget;
    let offers = |memory: fn() -> HostBudget| {
        let mut testbed = Testbed::within(memory);
        two(&mut testbed, [DOMAIN, DOMAIN]).map(|(mut agent, _)| agent.words().len())
    };
    // A segment of one chunk may take a quarter of the memory. Free memory is one and a half
    // chunks, an eighth of the memory is half a chunk.
    assert_eq!(
        offers(|| HostBudget { total_bytes: 4 * CHUNK, free_bytes: CHUNK + CHUNK / 2 }),
        [1, 1]
    );
    assert_eq!(offers(|| HostBudget { total_bytes: 4 * CHUNK - 4, free_bytes: 4 * CHUNK }), [0, 0]);
    assert_eq!(
        offers(|| HostBudget { total_bytes: 4 * CHUNK, free_bytes: CHUNK + CHUNK / 2 - 1 }),
        [0, 0]
    );
    assert_eq!(offers(|| HostBudget { total_bytes: 0, free_bytes: 0 }), [0, 0]);
}

#[test]
fn chunk_that_was_not_given_up_ends_the_process() {
    for given_up_bytes in [0, CHUNK - 4096] {
        let mut testbed = Testbed::new();
        let [(mut agent, file), (mut other, _)] = two(&mut testbed, [DOMAIN, DOMAIN]);
        if given_up_bytes > 0 {
            give_up(&file, given_up_bytes);
        }
        agent.say(ToCopier::Mapped { chunk: 0, taken: true }, None);
        testbed.settle().unwrap();
        assert!(agent.is_hung_up() && !other.is_hung_up());
    }
}

#[test]
fn answer_to_nothing_offered_ends_the_process() {
    for chunk in [1, u32::MAX] {
        let mut testbed = Testbed::new();
        let [(mut agent, _), _] = two(&mut testbed, [DOMAIN, DOMAIN]);
        agent.say(ToCopier::Mapped { chunk, taken: false }, None);
        testbed.settle().unwrap();
        assert!(agent.is_hung_up());
    }
    let mut testbed = Testbed::new();
    let [(mut agent, file), _] = two(&mut testbed, [DOMAIN, DOMAIN]);
    give_up(&file, CHUNK);
    for _ in 0..2 {
        agent.say(ToCopier::Mapped { chunk: 0, taken: true }, None);
    }
    testbed.settle().unwrap();
    assert!(agent.is_hung_up(), "twice");
}

#[test]
fn chunk_that_was_not_taken_stays_its_own() {
    let mut testbed = Testbed::new();
    let [(mut agent, _), _other] = two(&mut testbed, [DOMAIN, DOMAIN]);
    agent.say(ToCopier::Mapped { chunk: 0, taken: false }, None);
    testbed.settle().unwrap();
    agent.words();
    testbed.fill(1, CHUNK + UNIT);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    let content = [&pattern(CHUNK, 7)[..], &pattern(UNIT, 1)].concat();
    assert!(content_of_blocks(&agent.received()) == content);
}

#[test]
fn restoring_process_is_offered_nothing() {
    for order in [true, false] {
        let mut testbed = Testbed::new();
        let one = testbed.attach(1, CHUNK, DOMAIN);
        let mut other = testbed.attach(2, CHUNK, DOMAIN);
        let file = content_file(&pattern(CHUNK, 7));
        one.leave(&pieces(&[CHUNK / UNIT]), 0, &file);
        testbed.settle().unwrap();
        if order {
            testbed.fill(1, CHUNK);
        } else {
            fake::with(fake::Fake::copies_wait);
            one.say(ToCopier::Restoring, None);
        }
        testbed.settle().unwrap();
        other.leave(&pieces(&[CHUNK / UNIT]), 0, &content_file(&pattern(CHUNK, 7)));
        testbed.settle().unwrap();
        assert_eq!(other.words(), [], "a process that is restored gets no offer");
        fake::run_copies();
    }
}

/// Requests a copy out into a shared chunk. The copier must not start this copy, because other
/// processes may read the shared content.
#[test]
fn shared_chunk_is_never_copied_over() {
    let mut testbed = Testbed::new();
    let [(agent, file), _other] = two(&mut testbed, [DOMAIN, DOMAIN]);
    give_up(&file, CHUNK);
    agent.say(ToCopier::Mapped { chunk: 0, taken: true }, None);
    testbed.settle().unwrap();
    take(&agent, &pieces(&[CHUNK / UNIT]));
    testbed.settle().unwrap();
    fake::with(|fake| {
        assert!(!fake.calls().contains(&"copy_out"));
        assert!(fake.faults().is_empty(), "{:?}", fake.faults());
    });
}

#[test]
fn process_that_does_not_answer_is_asked_no_more() {
    let mut testbed = Testbed::new();
    let [(mut agent, _), (mut other, _)] = two(&mut testbed, [DOMAIN, DOMAIN]);
    assert_eq!((agent.words().len(), other.words().len()), (1, 1));
    other.say(ToCopier::Mapped { chunk: 0, taken: false }, None);
    testbed.wait(6 * SECOND);
    testbed.settle().unwrap();
    let mut third = testbed.attach(3, CHUNK, DOMAIN);
    third.leave(&pieces(&[CHUNK / UNIT]), 0, &content_file(&pattern(CHUNK, 7)));
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [], "it has not answered");
    assert_eq!(third.words().len(), 1, "the segment is there still");
}
