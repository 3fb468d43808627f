use super::super::fake_driver::{CONTEXT, STACK_LIMIT, THREADS};
use super::super::pending_work::tests::{OTHER, Process};
use super::*;

fn process() -> Process {
    let process = Process::new();
    // The two contexts are checked only after this test has the driver: an earlier test may have
    // left them without a limit.
    [CONTEXT, OTHER].into_iter().for_each(context_ends);
    process.add_context(OTHER);
    process
}

#[test]
fn local_memory_leaves_and_comes_back() {
    let process = process();
    release();
    assert!(is_released());
    assert_eq!(released_bytes(), 2 * (STACK_LIMIT * THREADS) as u64);
    assert_eq!([CONTEXT, OTHER].map(|context| process.fake.stack_limit(context)), [0, 0]);
    // A second call, as after a restore that failed half way.
    release();
    assert_eq!(restore(), Ok(()));
    assert!(!is_released());
    assert_eq!(released_bytes(), 0);
    assert_eq!([CONTEXT, OTHER].map(|context| process.fake.stack_limit(context)), [STACK_LIMIT; 2]);
}

#[test]
fn refused_limit_releases_nothing() {
    let process = process();
    process.fake.fail("cuCtxSetLimit", 1);
    release();
    assert_eq!([CONTEXT, OTHER].map(|context| process.fake.stack_limit(context)), [0, STACK_LIMIT]);
    assert_eq!(released_bytes(), (STACK_LIMIT * THREADS) as u64);
    assert_eq!(restore(), Ok(()));
}

#[test]
fn full_device_leaves_the_rest_for_later() {
    let process = process();
    release();
    process.fake.fail("cuCtxSetLimit", 1);
    assert_eq!(restore(), Err(result::OUT_OF_MEMORY));
    assert_eq!([CONTEXT, OTHER].map(|context| process.fake.stack_limit(context)), [STACK_LIMIT, 0]);
    assert!(is_released());
    assert_eq!(restore(), Ok(()));
    assert_eq!(process.fake.stack_limit(OTHER), STACK_LIMIT);
}

#[test]
fn ended_context_is_forgotten() {
    let process = process();
    release();
    context_ends(OTHER);
    assert_eq!(released_bytes(), (STACK_LIMIT * THREADS) as u64);
    assert_eq!(restore(), Ok(()));
    assert_eq!(process.fake.stack_limit(OTHER), 0, "an ended context must get no local memory");
}

#[test]
fn captured_stream_keeps_local_memory() {
    let process = process();
    process.capture();
    release();
    assert!(!is_released());
}
