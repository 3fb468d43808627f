use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::super::contexts::ctx_destroy;
use super::super::fake_driver::{CONTEXT, Fake};
use super::super::prefault::tests::SHARED;
use super::*;

/// Lock that stands for the dynamic loader's lock in tests.
pub static LOCK: Mutex<()> = Mutex::new(());

const OTHER_CONTEXT: usize = 0x99;

/// Sets whether the module counts as loaded, for tests that do not load it.
pub fn set_loaded(is_loaded: bool) {
    PROCESS.module_load.is_loaded.store(u32::from(is_loaded), Ordering::SeqCst);
}

fn wait_for_end() {
    while is_awaited() {
        std::thread::yield_now();
    }
}

/// A load that was given up must not call the driver, because the application may have destroyed
/// the context before the thread gets the lock.
#[test]
fn load_that_was_given_up_calls_no_driver() {
    let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let fake = Fake::new();
    set_loaded(false);
    let held = LOCK.lock().unwrap();
    assert!(!load_ahead_within(OTHER_CONTEXT, 20) && is_awaited());
    drop(held);
    wait_for_end();
    assert!(fake.pushed().is_empty() && !is_loaded());
    assert!(load_ahead_within(OTHER_CONTEXT, 60_000) && is_loaded());
    assert_eq!(fake.pushed(), [OTHER_CONTEXT]);
}

/// After a load that was given up, the next call must wait for the thread that the first call has
/// started.
#[test]
fn load_that_was_given_up_is_taken_up_again() {
    let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let fake = Fake::new();
    set_loaded(false);
    let held = LOCK.lock().unwrap();
    assert!(!load_ahead_within(OTHER_CONTEXT, 20));
    std::thread::scope(|scope| {
        let second = scope.spawn(|| load_ahead_within(OTHER_CONTEXT + 1, 60_000));
        while PROCESS.module_load.state() != WAITING {
            std::thread::yield_now();
        }
        drop(held);
        assert!(second.join().unwrap());
    });
    assert!(is_loaded());
    assert_eq!(fake.pushed(), [OTHER_CONTEXT + 1]);
}

/// The first load must not invalidate a capture of the application.
#[test]
fn load_does_not_invalidate_a_capture() {
    let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let fake = Fake::new();
    set_loaded(false);
    fake.begin_capture();
    assert!(load_ahead_within(CONTEXT, 60_000));
    assert!(is_loaded() && !fake.is_capture_invalid());
}

/// No digest may be computed after a failed load of the module. The agent's own load would then be
/// the first load, and could wait for the loader's lock.
#[test]
fn no_digest_is_computed_after_a_failed_load() {
    let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let fake = Fake::new();
    set_loaded(false);
    fake.fail("cuModuleLoadData", 0);
    assert!(load_ahead_within(CONTEXT, 60_000) && !fake.is_still_to_fail());
    assert!(!is_loaded() && digest::of(digest::SLOT_BYTES, |_| false).is_none());
    assert!(load_ahead_within(CONTEXT, 60_000) && is_loaded());
    assert!(digest::of(digest::SLOT_BYTES, |_| false).is_some());
}

#[test]
fn context_ends_after_the_load_in_it() {
    let _own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let _fake = Fake::new();
    let has_ended = AtomicBool::new(false);
    PROCESS.module_load.state.store(LOADING, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let destroyer = scope.spawn(|| {
            // SAFETY: the unit tests' driver takes any number.
            unsafe { ctx_destroy(OTHER_CONTEXT) };
            has_ended.load(Ordering::SeqCst)
        });
        let is_inside = || super::super::with_pool_if_free(|_| ()).is_none();
        while !is_inside() && !destroyer.is_finished() {
            std::thread::yield_now();
        }
        has_ended.store(true, Ordering::SeqCst);
        PROCESS.module_load.end();
        assert!(destroyer.join().unwrap());
    });
}
