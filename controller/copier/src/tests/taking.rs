//! Tests in which the copier copies out memory that a process has exported.

use super::*;

/// Returns the expected content of the file after all pieces were copied out. Each byte of a piece
/// is the piece's number of units.
fn taken_content() -> Vec<u8> {
    full_of_units(&UNITS)
}

#[test]
fn exported_memory_is_copied_to_its_place() {
    let (mut testbed, mut agent, file) = reach(Stage::Taken);
    assert_eq!(agent.words(), [FromCopier::Ready, FromCopier::Copied]);
    assert!(content_of(&file, COPIED_OUT_BYTES as usize) == taken_content());
    let reports = testbed.take_reports();
    let prepared = CopierReport::Prefaulted { process: 1, bytes: COPIED_OUT_BYTES };
    assert_eq!(reports.first(), Some(&prepared));
    let copied =
        matches!(reports[1..], [CopierReport::Copied { process: 1, bytes: COPIED_OUT_BYTES, .. }]);
    assert!(copied, "{reports:?}");
    agent.say(ToCopier::Checkpointed, None);
    testbed.settle().unwrap();
    assert_eq!(
        testbed.take_reports(),
        [CopierReport::Registered { process: 1, bytes: COPIED_OUT_BYTES }]
    );
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    assert!(content_of_blocks(&agent.received()) == taken_content(), "the content is the same");
}

#[test]
fn copied_is_said_once_the_copies_have_ended() {
    let (mut testbed, mut agent, file) = reach(Stage::Listed);
    agent.words();
    fake::with(fake::Fake::copies_wait);
    take(&agent, &pieces(&UNITS));
    for _ in 0..3 {
        testbed.settle().unwrap();
        assert_eq!(agent.words(), [], "nothing was copied yet");
    }
    assert!(testbed.reports.iter().all(|report| !matches!(report, CopierReport::Copied { .. })));
    fake::run_copies();
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [FromCopier::Copied]);
    assert!(content_of(&file, COPIED_OUT_BYTES as usize) == taken_content());
}

#[test]
fn copied_is_said_once_all_pieces_have_come() {
    let (mut testbed, mut agent, _) = reach(Stage::Taking);
    testbed.settle().unwrap();
    assert_eq!(agent.words(), [FromCopier::Ready]);
}

/// A process closes its descriptors of the exported memory when it receives Copied. The memory must
/// then be free, because the copier releases it before it sends Copied.
#[test]
fn exported_memory_is_released_before_copied() {
    let (mut testbed, mut agent, _) = reach(Stage::Taking);
    assert_eq!(fake::with(|fake| fake.imported_bytes()), UNIT);
    take(&agent, &pieces(&UNITS)[1..]);
    loop {
        testbed.turn().unwrap();
        if agent.words().contains(&FromCopier::Copied) {
            break;
        }
    }
    fake::with(|fake| {
        assert_eq!((fake.imported_bytes(), fake.left().mappings), (0, 0));
        assert!(fake.faults().is_empty(), "{:?}", fake.faults());
    });
}

#[test]
fn copy_out_that_fails_is_never_said_to_be_done() {
    let (mut testbed, mut agent, _) = reach(Stage::Taking);
    agent.words();
    fake::with(|fake| fake.copies_fail(700));
    take(&agent, &pieces(&UNITS)[1..]);
    // The next call for another process shows that the context is unusable.
    let _ = testbed.settle();
    assert!(agent.is_hung_up());
    assert_eq!(agent.words(), []);
    let reports = testbed.take_reports();
    assert!(reports.iter().all(|report| !matches!(report, CopierReport::Copied { .. })));
}

#[test]
fn no_piece_is_taken_before_file_is_registered() {
    let mut testbed = Testbed::new();
    let mut agent = testbed.attach(1, COPIED_OUT_BYTES, 0);
    agent.copy_out(&pieces(&UNITS), 0, Some(&content_file(&pattern(COPIED_OUT_BYTES, 1))));
    take(&agent, &pieces(&UNITS));
    assert_ended(&mut testbed, &mut agent, "its file is not registered");
}

#[test]
fn invalid_descriptor_ends_its_session_only() {
    let (pipe, _end) = std::io::pipe().unwrap();
    let pipe = OwnedFd::from(pipe);
    for thing in [
        std::fs::File::open("/").unwrap().into(),
        std::fs::File::open("/dev/null").unwrap().into(),
        content_file(&pattern(UNIT, 1)),
        pipe,
        pair().0,
        // Sizes that differ from the size of the piece.
        fake::made_by_another(2 * UNIT as usize, 1).unwrap(),
        fake::made_by_another(UNIT as usize / 2, 1).unwrap(),
    ] {
        let (mut testbed, mut agent, _) = reach(Stage::Listed);
        agent.say(ToCopier::CopyOut, Some(&thing));
        assert_ended(&mut testbed, &mut agent, "it is no memory of that size");
        assert_serves(&mut testbed);
    }
}

#[test]
fn more_pieces_than_listed_are_refused() {
    let (mut testbed, mut agent, _) = reach(Stage::Listed);
    fake::with(fake::Fake::copies_wait);
    take(&agent, &pieces(&[1, 2, 1]));
    assert_ended(&mut testbed, &mut agent, "three of two");
}

#[test]
fn late_piece_ends_the_session() {
    let (mut testbed, mut agent, _) = reach(Stage::Taking);
    testbed.wait(2 * SECOND - SECOND / 4);
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up(), "it is waited for");
    testbed.wait(SECOND / 2);
    assert_ended(&mut testbed, &mut agent, "the next piece is late");
}

#[test]
fn late_copies_end_the_session() {
    let (mut testbed, mut agent, _) = reach(Stage::Listed);
    fake::with(fake::Fake::copies_wait);
    take(&agent, &pieces(&UNITS));
    testbed.settle().unwrap();
    testbed.wait(9 * SECOND);
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up(), "all pieces are there, and are waited for");
    testbed.wait(2 * SECOND);
    assert_ended(&mut testbed, &mut agent, "the copies are late");
}

#[test]
fn unprepared_bus_time_grows_with_the_content() {
    // The time limit of a fill is 10 s plus the time of its copies, which is nearly 0 for 3 units.
    // For a large region the limit must be longer.
    let (mut testbed, mut agent, _) = reach(Stage::Filling);
    testbed.wait(9 * SECOND);
    testbed.settle().unwrap();
    assert!(!agent.is_hung_up());
    testbed.wait(2 * SECOND);
    assert_ended(&mut testbed, &mut agent, "the fill is late");
}
