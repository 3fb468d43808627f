//! Runs a copier with one honest process and several hostile processes.

use std::{fs::File, io, os::fd::OwnedFd, time::Duration};

use affinode_proto::wire::copier::PIECES_A_FRAME;
use rustix::fs::FallocateFlags;

use super::*;

/// Process number of the honest process.
const HONEST: u64 = 9;
/// Number of hostile processes. Their process numbers begin with 1.
const HOSTILE: usize = 3;
/// Maximum memory that a process may copy out, in units of [`UNIT`] bytes.
const MAX_UNITS: u64 = 4;
/// Maximum number of simulated steps.
const MAX_STEPS: usize = 120;

/// Runs one test: interprets bytes as actions of hostile processes, of the controller and of the
/// GPU. Then the copier copies the memory of an honest process back into VRAM.
///
/// # Panics
/// If the copier has ended, broken a rule of the driver, allocated memory that was not granted, or
/// kept an object of a detached process. It also panics if the honest process did not get its
/// content.
pub fn play(data: &[u8]) {
    let mut play = Play::new(data);
    for _ in 0..MAX_STEPS {
        if play.bytes.is_empty() {
            break;
        }
        play.step();
    }
    play.ends();
}

#[derive(Default)]
struct Hostile {
    agent: Option<Agent>,
    /// Largest amount of VRAM in bytes that a Fill order has granted since the process was
    /// attached.
    granted_bytes: u64,
    /// Whether the process has sent Restoring.
    restores: bool,
}

struct Play<'a> {
    bytes: &'a [u8],
    testbed: Testbed,
    hostile: [Hostile; HOSTILE],
    honest: Agent,
    content: Vec<u8>,
    /// Descriptors of several kinds, which hostile processes send.
    things: Vec<Option<OwnedFd>>,
}

impl<'a> Play<'a> {
    fn new(bytes: &'a [u8]) -> Play<'a> {
        let mut testbed = Testbed::new();
        let honest = testbed.attach(HONEST, 2 * UNIT, 5);
        let content = pattern(2 * UNIT, HONEST);
        honest.leave(&pieces(&[1, 1]), 0, &content_file(&content));
        testbed.settle().unwrap();
        fake::with(fake::Fake::copies_wait);
        let (things, hostile) = (things(), Default::default());
        Play { bytes, testbed, hostile, honest, content, things }
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        *first
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    fn units(&mut self) -> u64 {
        self.below(2 * MAX_UNITS as usize) as u64
    }

    fn step(&mut self) {
        let nth = self.below(HOSTILE);
        let process = nth as u64 + 1;
        match self.below(16) {
            0 | 1 => {
                let agent = self.testbed.attach(process, MAX_UNITS * UNIT, 5);
                self.hostile[nth] = Hostile { agent: Some(agent), ..Hostile::default() };
            }
            2 => {
                let bytes = self.units() * UNIT;
                self.testbed.fill(process, bytes);
                let granted_bytes = &mut self.hostile[nth].granted_bytes;
                *granted_bytes = bytes.max(*granted_bytes);
            }
            3 => {
                let on = self.byte() & 1 == 1;
                self.testbed.order(CopierOrder::HoldVram { on }, None);
            }
            4 => {
                if let Some(agent) = &mut self.hostile[nth].agent {
                    agent.hang_up();
                }
            }
            5 => fake::run_copies(),
            6 => {
                let passed_ms = u64::from(self.byte()) * 20;
                self.testbed.wait(Duration::from_millis(passed_ms));
            }
            7 => {
                if let Some(agent) = &mut self.hostile[nth].agent {
                    agent.received();
                }
            }
            8 => self.scribble(),
            9 => {
                let many = self.below(130);
                let packet: Vec<u8> = (0..many).map(|_| self.byte()).collect();
                if let Some(agent) = &self.hostile[nth].agent {
                    agent.say_packet(&packet);
                }
            }
            10 => self.turns(true),
            _ => self.say(nth),
        }
        self.turns(false);
    }

    fn say(&mut self, nth: usize) {
        let uuid = if self.byte() == 0xff { [1; 16] } else { fake::UUID };
        let message = match self.below(10) {
            0 => ToCopier::Prefaulted { bytes: self.units() * UNIT, uuid },
            1 => {
                let (bytes, pieces) = (self.units() * UNIT, self.below(6) as u32);
                ToCopier::CopiedOut {
                    bytes,
                    rest_bytes: u64::from(self.byte()) << 23,
                    pieces,
                    uuid,
                }
            }
            2 | 3 => {
                let mut words = [0; PIECES_A_FRAME];
                let many = self.below(4) as u32;
                for word in &mut words[..many as usize] {
                    *word = self.units() as u32;
                }
                ToCopier::Chunks { many, words }
            }
            4 | 5 => ToCopier::CopyOut,
            6 => ToCopier::Checkpointed,
            7 => {
                self.hostile[nth].restores = true;
                ToCopier::Restoring
            }
            8 => ToCopier::Restored,
            _ => ToCopier::Mapped { chunk: self.below(3) as u32, taken: self.byte() & 1 == 1 },
        };
        let takes_a_file = matches!(
            message,
            ToCopier::Prefaulted { .. } | ToCopier::CopiedOut { .. } | ToCopier::CopyOut
        );
        // Mostly valid, because several errors at once usually end the session early.
        let kind = match self.byte() {
            wrong @ 0..64 => usize::from(wrong) % self.things.len(),
            n if takes_a_file && matches!(message, ToCopier::CopyOut) => usize::from(n) % 3 + 5,
            n if takes_a_file => usize::from(n) % 4 + 1,
            _ => 0,
        };
        if let (Some(agent), Some(thing)) = (&self.hostile[nth].agent, self.things.get(kind)) {
            agent.say(message, thing.as_ref());
        }
    }

    /// Overwrites the memory file of a hostile process, as a process may do at any time.
    fn scribble(&mut self) {
        let (page, is_hole) = (self.below(8) as u64 * UNIT / 2, self.byte() & 1 == 1);
        let file = self.things[4].as_ref().unwrap();
        if is_hole {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, flags, page, 4096).unwrap();
        } else {
            let file = File::from(file.try_clone().unwrap());
            file.write_all_at(&[7; 4096], page).unwrap();
        }
    }

    fn turns(&mut self, settles: bool) {
        let turned = if settles { self.testbed.settle() } else { self.testbed.turn() };
        assert!(matches!(turned, Ok(Some(_))), "the copier has ended: {turned:?}");
        let granted = |hostile: &&Hostile| hostile.restores;
        let of = |hostile: &Hostile| hostile.granted_bytes;
        let granted_bytes: u64 = self.hostile.iter().filter(granted).map(of).sum();
        fake::with(|fake| {
            assert_eq!(fake.faults(), &[] as &[String]);
            assert!(fake.made_bytes() <= granted_bytes + 2 * UNIT, "made without a grant");
            assert!(fake.imported_bytes() <= HOSTILE as u64 * MAX_UNITS * UNIT);
        });
    }

    fn ends(mut self) {
        self.testbed.order(CopierOrder::HoldVram { on: false }, None);
        self.testbed.fill(HONEST, 2 * UNIT);
        self.honest.say(ToCopier::Restoring, None);
        self.honest.say(ToCopier::Restored, None);
        let mut received = Vec::new();
        for _ in 0..4 {
            self.testbed.settle().unwrap();
            fake::run_copies();
            received.extend(self.honest.received());
        }
        assert_eq!(received.last().map(|(message, _)| *message), Some(FromCopier::Filled));
        assert!(content_of_blocks(&received) == self.content, "the honest process has its content");
        self.honest.hang_up();
        for hostile in &mut self.hostile {
            hostile.agent = None;
        }
        self.testbed.settle().unwrap();
        self.testbed.assert_nothing_is_left();
    }
}

/// Creates the descriptors that hostile processes send: no descriptor, memory files, device memory,
/// and other files. `scribble` later overwrites the last of the sealed memory files.
fn things() -> Vec<Option<OwnedFd>> {
    thread_local! {
        static FILES: Vec<OwnedFd> = {
            let file = |units: u64| content_file(&pattern(units * UNIT, 1));
            let unsealed = memory_file(&pattern(UNIT, 1), SealFlags::empty());
            vec![file(1), file(2), file(MAX_UNITS), file(MAX_UNITS), unsealed]
        };
    }
    let mut things: Vec<Option<OwnedFd>> = vec![None];
    let mut files = FILES.with(|files| {
        files.iter().map(|file| file.try_clone()).collect::<io::Result<Vec<_>>>().unwrap()
    });
    let unsealed = files.pop();
    things.extend(files.into_iter().map(Some));
    for units in [1, 2, 3] {
        things.push(Some(fake::made_by_another((units * UNIT) as usize, 1).unwrap()));
    }
    things.push(unsealed);
    things.push(Some(File::open("/").unwrap().into()));
    things.push(Some(File::open("/dev/zero").unwrap().into()));
    things.push(Some(std::io::pipe().unwrap().0.into()));
    things.push(Some(pair().0));
    things
}
