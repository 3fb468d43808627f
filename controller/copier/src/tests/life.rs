//! Tests of a process that follows the protocol, from the announcement of its memory file until its
//! memory is back in VRAM.

use std::os::fd::AsFd;

use super::*;

#[test]
fn copied_process_is_filled_with_its_content() {
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, 6 * UNIT, 0);
    let content = pattern(6 * UNIT, 1);
    agent.leave(&pieces(&[1, 2, 3]), 0, &content_file(&content));
    testbed.settle().unwrap();
    assert_eq!(testbed.take_reports(), [CopierReport::Registered { process: 1, bytes: 6 * UNIT }]);
    testbed.fill(1, 6 * UNIT);
    agent.say(ToCopier::Restoring, None);
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [FromCopier::Begin]);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    let received = agent.received();
    let words: Vec<_> = received.iter().map(|(message, _)| *message).collect();
    let block = |index| FromCopier::Block { index };
    assert_eq!(words, [block(0), block(1), block(2), FromCopier::Filled]);
    assert!(content_of_blocks(&received) == content, "each block has its place's content");
    let reports = testbed.take_reports();
    let filled = |r: &CopierReport| matches!(r, CopierReport::Filled { process: 1, bytes, .. } if *bytes == 6 * UNIT);
    assert!(matches!(&reports[..], [report] if filled(report)), "{reports:?}");
    agent.hang_up();
    testbed.settle().unwrap();
    assert_eq!(
        testbed.take_reports(),
        [CopierReport::Detached { process: 1 }, CopierReport::Released]
    );
    testbed.assert_nothing_is_left();
}

#[test]
fn context_of_the_copier_has_no_local_memory() {
    let _testbed = Testbed::new();
    assert_eq!(fake::with(|fake| fake.stack_limit()), Some(0));
}

/// The copier must export a block only after the block is filled and the process has sent Restored.
/// An unfilled block has another tenant's content. Before Restored the process does not read its
/// messages.
#[test]
fn block_is_shared_once_it_is_filled() {
    let (mut testbed, mut agent, _) = reach(Stage::Filling);
    agent.words();
    fake::run_copies();
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [], "it is not restored yet");

    let (mut testbed, mut agent, _) = reach(Stage::Filling);
    agent.say(ToCopier::Restored, None);
    agent.words();
    for _ in 0..3 {
        testbed.settle().unwrap();
        assert_eq!(agent.words(), [], "nothing was copied yet");
    }
    assert!(testbed.reports.iter().all(|report| !matches!(report, CopierReport::Filled { .. })));
    assert!(fake::with(|fake| !fake.calls().contains(&"mem_export")));
    fake::run_copies();
    testbed.settle().unwrap();
    let block = |index| FromCopier::Block { index };
    assert_eq!(agent.words(), [block(0), block(1), FromCopier::Filled]);
    fake::with(|fake| assert!(fake.faults().is_empty(), "{:?}", fake.faults()));
}

#[test]
fn copy_in_that_fails_is_never_shared() {
    let (mut testbed, mut agent, _) = reach(Stage::Filling);
    agent.words();
    agent.say(ToCopier::Restored, None);
    fake::with(|fake| fake.copies_fail(700));
    testbed.settle().unwrap();
    fake::run_copies();
    let ended = testbed.settle();
    assert!(matches!(ended, Err(CopierError::Broken(_))), "{ended:?}");
    assert!(agent.is_hung_up());
    assert_eq!(agent.words(), []);
    assert!(fake::with(|fake| !fake.calls().contains(&"mem_export")));
}

#[test]
fn memory_is_made_for_the_bus_where_it_was() {
    for capable in [true, false] {
        let mut testbed = Testbed::new();
        if !capable {
            fake::with(fake::Fake::is_not_rdma_capable);
            testbed.open_again();
        }
        let mut agent = testbed.attach(1, 2 * UNIT, 0);
        let of = |rdma| Piece { bytes: UNIT, rdma };
        agent.leave(&[of(true), of(false)], 0, &content_file(&pattern(2 * UNIT, 1)));
        testbed.settle().unwrap();
        testbed.fill(1, 2 * UNIT);
        agent.say(ToCopier::Restoring, None);
        agent.say(ToCopier::Restored, None);
        testbed.settle().unwrap();
        let received = agent.received();
        let blocks = received.iter().filter_map(|(_, block)| block.as_ref());
        let rdma: Vec<_> = blocks.map(|block| fake::is_rdma(block.as_fd()).unwrap()).collect();
        assert_eq!(rdma, [capable, false]);
    }
}

#[test]
fn process_that_does_not_read_is_waited_for() {
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach_with_a_short_queue(1, 30 * UNIT, 0);
    let content = pattern(30 * UNIT, 1);
    agent.leave(&pieces(&[1; 30]), 0, &content_file(&content));
    testbed.settle().unwrap();
    testbed.fill(1, 30 * UNIT);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    assert_eq!(testbed.settle().unwrap(), Some(SessionStep::Soon), "its queue is full");
    let mut received = agent.received();
    assert!(received.len() < 30, "all were sent at once");
    for _ in 0..30 {
        testbed.settle().unwrap();
        received.extend(agent.received());
    }
    assert_eq!(received.last().map(|(message, _)| *message), Some(FromCopier::Filled));
    assert!(content_of_blocks(&received) == content);
}

#[test]
fn report_of_a_fill_has_its_time() {
    let (mut testbed, agent, _) = reach(Stage::Filling);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    testbed.wait(3 * SECOND);
    fake::run_copies();
    testbed.settle().unwrap();
    let filled = testbed.take_reports().into_iter().find_map(|report| match report {
        CopierReport::Filled { elapsed_us, .. } => Some(elapsed_us),
        _ => None,
    });
    assert_eq!(filled, Some(3_000_000));
}

/// Some pieces cross from one chunk into the next. The copier must copy these pieces in parts, out
/// of VRAM and back, because the driver refuses a copy that crosses from one registration into
/// another.
#[test]
fn content_across_chunks_is_copied_in_parts() {
    const CHUNK: u64 = crate::sys::CHUNK_BYTES as u64;
    let units = CHUNK / UNIT;
    let list = [units - 1, 2, 1];
    let bytes = CHUNK + 2 * UNIT;
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, bytes, 0);
    let content = pattern(bytes, 1);
    let file = content_file(&content);
    agent.say(ToCopier::Prefaulted { bytes, uuid: fake::UUID }, Some(&file));
    testbed.settle().unwrap();
    agent.copy_out(&pieces(&list), 0, None);
    take(&agent, &pieces(&list));
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [FromCopier::Ready, FromCopier::Copied]);
    let taken = full_of_units(&list);
    assert!(content_of(&file, bytes as usize) == taken);
    agent.say(ToCopier::Checkpointed, None);
    testbed.settle().unwrap();
    testbed.fill(1, bytes);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    assert!(content_of_blocks(&agent.received()) == taken);
    agent.hang_up();
    testbed.settle().unwrap();
    testbed.assert_nothing_is_left();
}
