//! Tests the real thunk, gate and agent together. Threads and signal handlers make calls without a
//! pause. The test's driver aborts the process if a call is inside the driver while the process is
//! checkpointed.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use affinode_cuda_sys::hook::{self, Class};
use affinode_proto::wire::message::{Action, Outcome};

use super::*;
use crate::agent::machine::OrderMachine;
use crate::{hook_table, thunk};

const SIGUSR1: u64 = 10;
const ROUNDS: u32 = 60;
/// Environment variable with the name of the test that this process runs.
const BODY: &str = "AFFINODE_TEST_BODY";

/// Runs a test in a process of its own, so that the test may register the process and end it.
fn in_own_process(test: &str, body: fn()) {
    if std::env::var(BODY).is_ok_and(|name| name == test) {
        return body();
    }
    let name = format!("agent::host::tests::{test}");
    let ended = std::process::Command::new(std::env::current_exe().unwrap())
        .args([&name, "--exact", "--nocapture"])
        .env(BODY, test)
        .output()
        .unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

/// Whether the test's driver has checkpointed the process.
static CHECKPOINTED: AtomicBool = AtomicBool::new(false);
/// Number of calls that are inside the test's driver now.
static WITHIN: AtomicU32 = AtomicU32::new(0);
/// Number of driver calls that have ended.
static MADE: AtomicU64 = AtomicU64::new(0);

extern "C" fn driver_call() -> u32 {
    WITHIN.fetch_add(1, Ordering::SeqCst);
    for _ in 0..8 {
        if CHECKPOINTED.load(Ordering::SeqCst) {
            std::process::abort();
        }
    }
    WITHIN.fetch_sub(1, Ordering::SeqCst);
    MADE.fetch_add(1, Ordering::Relaxed);
    0
}

/// Returns a hooked function whose calls are polls. Unlike other calls, a poll at the closed gate
/// does not count as a waiting caller, so it does not cancel the close of the gate.
fn hooked() -> extern "C" fn() -> u32 {
    let (number, class) = hook::find(b"cuStreamQuery").unwrap();
    assert_eq!(class, Class::Poll);
    let real = driver_call as extern "C" fn() -> u32 as usize;
    let stub = thunk::stub(hook_table::index_of(real, number, class).unwrap());
    // SAFETY: the stub has the parameters and the result of the function that it calls.
    unsafe { core::mem::transmute::<usize, extern "C" fn() -> u32>(stub) }
}

extern "C" fn handle(_: i32) {
    hooked()();
}

static STOP: AtomicBool = AtomicBool::new(false);
/// Cache lines that all calling threads write without a pause. Other stores of these threads then
/// take longer to become visible.
static CONTENDED: [[AtomicU64; 8]; 48] = [const { [const { AtomicU64::new(0) }; 8] }; 48];

fn call_without_pause(tids: &AtomicU32) {
    let call = hooked();
    call();
    tids.store(sys::gettid(), Ordering::Release);
    while !STOP.load(Ordering::Relaxed) {
        for [word, ..] in &CONTENDED {
            word.store(1, Ordering::Relaxed);
        }
        call();
    }
}

fn close_and_open(rounds: u32, with_signals: bool) {
    let page = process::manage().unwrap();
    let mut own = DriverHost {
        page,
        gpus: GpuMap::none(),
        watch: BlockedThreadWatch::new(),
        turn: None,
        patience: WaitBudget::default(),
    };
    let mut machine = OrderMachine::new();
    machine.release_allocations(&mut own);
    let tids = [const { AtomicU32::new(0) }; 3];
    let end = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        for tid in &tids {
            scope.spawn(move || call_without_pause(tid));
        }
        while tids.iter().any(|tid| tid.load(Ordering::Acquire) == 0) {
            std::thread::yield_now();
        }
        let mut closed = 0;
        while closed < rounds && Instant::now() < end {
            if with_signals {
                let tid = tids[closed as usize % tids.len()].load(Ordering::Relaxed);
                sys::signal_thread(tid, SIGUSR1).unwrap();
            }
            let close = Action::Close { deadline_ms: 1_000 };
            if machine.execute_order(&mut own, close).0 != Outcome::Done {
                continue;
            }
            closed += 1;
            CHECKPOINTED.store(true, Ordering::SeqCst);
            for _ in 0..100 {
                if WITHIN.load(Ordering::SeqCst) != 0 {
                    std::process::abort();
                }
            }
            CHECKPOINTED.store(false, Ordering::SeqCst);
            machine.execute_order(&mut own, Action::Open);
            // Some calls go through before the next round.
            let made = MADE.load(Ordering::Relaxed);
            while MADE.load(Ordering::Relaxed) == made && Instant::now() < end {
                std::thread::yield_now();
            }
        }
        STOP.store(true, Ordering::Relaxed);
        assert_eq!(closed, rounds, "in a minute");
    });
    assert!(page.drained(|slot| &slot.inflight));
}

#[test]
fn threads_stay_out_of_a_closed_gate() {
    in_own_process("threads_stay_out_of_a_closed_gate", || close_and_open(ROUNDS, false));
}

#[test]
fn handlers_stay_out_of_a_closed_gate() {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    in_own_process("handlers_stay_out_of_a_closed_gate", || {
        let action =
            SigAction::new(SigHandler::Handler(handle), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler calls the stub and nothing else, as the handlers of programs do.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        close_and_open(ROUNDS, true);
    });
}

#[test]
fn held_lock_is_waited_for_once() {
    let mut patience = WaitBudget::default();
    let tries = core::cell::Cell::new(0);
    let mut take = |free_at: u32| {
        tries.set(0);
        let try_lock = || {
            tries.set(tries.get() + 1);
            (tries.get() >= free_at).then_some(())
        };
        (patience.take(try_lock, || {}).is_some(), tries.get())
    };
    assert_eq!(take(1), (true, 1));
    assert_eq!(take(40), (true, 40));
    assert_eq!(take(u32::MAX), (false, WaitBudget::MAX_TRIES));
    // Another container holds the lock permanently: from now on each move makes only one attempt.
    assert_eq!(take(40), (false, 1));
    assert_eq!(take(1), (true, 1));
    assert_eq!(take(40), (true, 40));
}
