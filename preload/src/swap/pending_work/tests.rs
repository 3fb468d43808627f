use std::sync::MutexGuard;

use super::super::fake_driver::{CONTEXT, Fake};
use super::super::prefault::tests::SHARED;
use super::*;

pub(in crate::swap) const OTHER: usize = 0x88;
const STREAM: usize = 0x50;

/// Test process with the fake driver, in which the primary context is the only context and no
/// stream is captured.
pub(in crate::swap) struct Process {
    pub fake: Fake,
    _own: MutexGuard<'static, ()>,
}

impl Process {
    pub fn new() -> Process {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let fake = Fake::new();
        fake.hold_primary();
        Process { fake, _own: own }
    }

    /// Creates a context beside the primary one.
    pub fn add_context(&self, context: usize) {
        SWAP.contexts.add(context);
    }

    /// Begins the capture of a stream.
    pub fn capture(&self) {
        SWAP.captures.add(STREAM);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        for list in [&SWAP.contexts, &SWAP.attached, &SWAP.captures] {
            list.values().for_each(|value| {
                list.remove(value);
            });
            list.missed.store(0, Ordering::Relaxed);
        }
    }
}

fn never() -> bool {
    panic!("the wait must end at the first look, because the work is done")
}

#[test]
fn work_of_every_context_is_awaited() {
    let process = Process::new();
    SWAP.contexts.add(OTHER);
    assert_eq!(wait(never), GpuWork::Done);
    assert_eq!(process.fake.awaited(), [CONTEXT, OTHER]);
    context_ends(OTHER);
    assert_eq!(wait(never), GpuWork::Done);
    assert_eq!(process.fake.awaited(), [CONTEXT, OTHER, CONTEXT]);
    assert_eq!(process.fake.events(), 0, "no event is left");
}

#[test]
fn wait_ends_with_the_work_or_the_patience() {
    let process = Process::new();
    process.fake.run_for(3);
    let mut looks = 0;
    let mut count = || {
        looks += 1;
        false
    };
    assert_eq!(wait(&mut count), GpuWork::Done);
    assert_eq!(looks, 3);
    process.fake.run_for(usize::MAX);
    assert_eq!(wait(|| true), GpuWork::Running);
    assert_eq!(process.fake.events(), 0);
}

#[test]
fn error_of_a_context_is_returned() {
    for step in ["cuEventCreate", "cuCtxRecordEvent", "cuEventQuery", "cuCtxPushCurrent_v2"] {
        let process = Process::new();
        SWAP.contexts.add(OTHER);
        process.fake.fail(step, usize::from(step != "cuCtxPushCurrent_v2"));
        // A full device has no memory for an event. The driver's lock needs none.
        let expected = match step {
            "cuEventCreate" | "cuCtxPushCurrent_v2" => GpuWork::Unseen { may_end: true },
            _ => GpuWork::Failed(result::OUT_OF_MEMORY),
        };
        assert_eq!(wait(never), expected, "{step}");
        assert_eq!(process.fake.events(), 0, "{step}");
    }
}

/// No event may be recorded while a stream is captured, whether the stream has a handle or is the
/// thread's default stream. The event would invalidate the capture.
#[test]
fn captured_stream_is_not_disturbed() {
    let process = Process::new();
    for (stream, name) in [(STREAM, STREAM), (0, PER_THREAD)] {
        let begin = if stream == 0 { begun_ptsz } else { begun };
        begin(stream, 1);
        assert_eq!(wait(never), GpuWork::Done, "a capture that did not begin is not recorded");
        begin(stream, result::SUCCESS);
        let unseen = GpuWork::Unseen { may_end: true };
        assert_eq!(wait(never), unseen);
        ended(name, 908);
        assert_eq!(wait(never), unseen, "another thread cannot end the capture");
        ended(name, 901);
        assert_eq!(wait(never), GpuWork::Done);
    }
    begun(STREAM, result::SUCCESS);
    destroyed(STREAM, result::SUCCESS);
    assert_eq!(wait(never), GpuWork::Done);
    drop(process);
}

#[test]
fn work_is_unseen_if_a_list_is_full() {
    let process = Process::new();
    (1..=SLOTS).for_each(|n| SWAP.contexts.add(n));
    assert_eq!(wait(never), GpuWork::Done);
    SWAP.contexts.add(SLOTS + 1);
    assert_eq!(wait(never), GpuWork::Unseen { may_end: false });
    drop(process);
}

/// If a context was created before memory became swappable, or by a function of a later driver, the
/// wait must return `Unseen`.
#[test]
fn work_is_unseen_after_an_unseen_beginning() {
    let process = Process::new();
    let number = |function: Function| function as u32 + 1;
    note_unseen(number(Function::cuLaunchKernel));
    assert_eq!(wait(never), GpuWork::Done);
    super::super::stand_in(number(Function::cuCtxCreate_v4), 0x4000_0000);
    assert_eq!(wait(never), GpuWork::Unseen { may_end: false });
    drop(process);
}
