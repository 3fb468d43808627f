//! Tests of the copier on a simulated driver. They check properties that hold for any input of a
//! container and for any error of the driver.

mod claims;
mod ends;
mod errors;
mod hostile;
mod life;
mod order;
mod room;
mod sharing;
mod taking;

use std::{os::fd::OwnedFd, time::Duration};

use affinode_proto::wire::copier::{CopierOrder, CopierReport, FromCopier, Piece, ToCopier};

use crate::{serve::CopierError, session::SessionStep, testing::*};

const SECOND: Duration = Duration::from_secs(1);
/// VRAM in bytes that the copier leaves free in addition to what the driver needs.
const MARGIN_BYTES: u64 = 1 << 30;
/// VRAM in bytes that the driver needs in these tests to restore the memory that the copier does
/// not copy.
const REST_BYTES: u64 = 300 << 20;
/// Sizes of a process's copied-out pieces, in units.
const UNITS: [u64; 2] = [1, 2];
const COPIED_OUT_BYTES: u64 = 3 * UNIT;

/// Stage that a process has reached in the protocol with the copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Prepared,
    /// The copier has received half of the list of pieces.
    Listing,
    /// The copier has received the whole list of pieces of a prefaulted process.
    Listed,
    /// The process has exported one of two pieces to be copied out.
    Taking,
    /// All pieces are copied out.
    Taken,
    Held,
    /// The copier is copying the process's memory back into VRAM.
    Filling,
    Filled,
}

const STAGES: [Stage; 9] = [
    Stage::New,
    Stage::Prepared,
    Stage::Listing,
    Stage::Listed,
    Stage::Taking,
    Stage::Taken,
    Stage::Held,
    Stage::Filling,
    Stage::Filled,
];

/// Creates a testbed and brings process 1 to a stage. Also returns the process's memory file.
fn reach(stage: Stage) -> (Testbed, Agent, OwnedFd) {
    let mut testbed = Testbed::new();
    let agent = testbed.attach(1, COPIED_OUT_BYTES, 0);
    let file = content_file(&pattern(COPIED_OUT_BYTES, 1));
    advance(&mut testbed, &agent, &file, stage);
    (testbed, agent, file)
}

/// Brings a new process to a stage of the protocol.
fn advance(testbed: &mut Testbed, agent: &Agent, file: &OwnedFd, stage: Stage) {
    let pieces = pieces(&UNITS);
    let steps: &[Stage] = match stage {
        Stage::New => &[],
        Stage::Prepared => &[Stage::Prepared],
        Stage::Listing => &[Stage::Listing],
        Stage::Listed => &[Stage::Prepared, Stage::Listed],
        Stage::Taking => &[Stage::Prepared, Stage::Listed, Stage::Taking],
        Stage::Taken => &[Stage::Prepared, Stage::Listed, Stage::Taking, Stage::Taken],
        Stage::Held => &[Stage::Held],
        Stage::Filling => &[Stage::Held, Stage::Filling],
        Stage::Filled => &[Stage::Held, Stage::Filling, Stage::Filled],
    };
    testbed.settle().unwrap();
    for step in steps {
        match step {
            Stage::New => {}
            Stage::Prepared => {
                agent.say(
                    ToCopier::Prefaulted { bytes: COPIED_OUT_BYTES, uuid: fake::UUID },
                    Some(file),
                );
            }
            Stage::Listing => {
                let copied_out = ToCopier::CopiedOut {
                    bytes: COPIED_OUT_BYTES,
                    rest_bytes: REST_BYTES,
                    pieces: 2,
                    uuid: fake::UUID,
                };
                agent.say(copied_out, Some(file));
                agent.say(one_of_the_list(pieces[0]), None);
            }
            Stage::Listed => agent.copy_out(&pieces, REST_BYTES, None),
            Stage::Taking => take(agent, &pieces[..1]),
            Stage::Taken => take(agent, &pieces[1..]),
            Stage::Held => agent.leave(&pieces, REST_BYTES, file),
            Stage::Filling => {
                fake::with(fake::Fake::copies_wait);
                testbed.fill(agent.process, COPIED_OUT_BYTES);
                agent.say(ToCopier::Restoring, None);
            }
            Stage::Filled => {
                agent.say(ToCopier::Restored, None);
                testbed.settle().unwrap();
                fake::run_copies();
            }
        }
        testbed.settle().unwrap();
    }
}

fn one_of_the_list(piece: Piece) -> ToCopier {
    let mut words = [0; affinode_proto::wire::copier::PIECES_A_FRAME];
    words[0] = piece.word().unwrap();
    ToCopier::Chunks { many: 1, words }
}

/// Exports pieces to the copier, each filled with its number of units.
fn take(agent: &Agent, pieces: &[Piece]) {
    for piece in pieces {
        let byte = (piece.bytes / UNIT) as u8;
        let memory = fake::made_by_another(piece.bytes as usize, byte).unwrap();
        agent.say(ToCopier::CopyOut, Some(&memory));
    }
}

fn copied_out(bytes: u64, pieces: u32) -> ToCopier {
    ToCopier::CopiedOut { bytes, rest_bytes: REST_BYTES, pieces, uuid: fake::UUID }
}

/// Asserts that the copier closes the socket of a process, reports the end of its session and
/// releases all its objects. The copier itself must continue.
fn assert_ended(testbed: &mut Testbed, agent: &mut Agent, why: &str) {
    testbed.settle().unwrap_or_else(|error| panic!("{why}: the copier has ended: {error}"));
    assert!(agent.is_hung_up(), "{why}: the process is served still");
    assert_left(testbed, why);
}

/// Asserts that the session of the process has ended and nothing of it remains.
fn assert_left(testbed: &mut Testbed, why: &str) {
    let reports = testbed.take_reports();
    assert!(reports.contains(&CopierReport::Detached { process: 1 }), "{why}: {reports:?}");
    assert_eq!(reports.last(), Some(&CopierReport::Released), "{why}");
    testbed.assert_nothing_is_left();
}

/// Asserts that the copier still serves another process through all stages.
fn assert_serves(testbed: &mut Testbed) {
    testbed.take_reports();
    let mut agent = testbed.attach(99, COPIED_OUT_BYTES, 0);
    let content = pattern(COPIED_OUT_BYTES, 99);
    agent.leave(&pieces(&UNITS), 0, &content_file(&content));
    testbed.settle().unwrap();
    testbed.fill(99, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    agent.say(ToCopier::Restored, None);
    testbed.settle().unwrap();
    fake::run_copies();
    testbed.settle().unwrap();
    let received = agent.received();
    assert_eq!(received.last().map(|(message, _)| *message), Some(FromCopier::Filled));
    assert!(content_of_blocks(&received) == content);
    agent.hang_up();
    testbed.settle().unwrap();
}
