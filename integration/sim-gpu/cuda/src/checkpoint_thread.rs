//! The checkpoint thread of a process. It executes the daemon's orders to lock, checkpoint and
//! restore the process.
//!
//! Like the real driver's thread, it exists from `cuInit` on and blocks every signal. It works
//! while the application's threads wait at the gate.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use affinode_sim_protocol::{Order, Packet, Reply, Report, Request, code};

use crate::abi::{NO_DEVICE, Outcome, status};
use crate::client;
use crate::driver::Driver;

/// Starts the checkpoint thread, and waits until the daemon has registered it. Returns the
/// descriptor of the thread's connection, which a forked child must close.
pub fn start(driver: &'static Driver) -> Outcome<RawFd> {
    let packet = client::connect().map_err(|_| NO_DEVICE)?;
    let fd = packet.as_fd().as_raw_fd();
    let (ready, started) = mpsc::channel();
    let work = move || {
        // SAFETY: no arguments, cannot fail.
        let tid = unsafe { libc::gettid() };
        let accepted = packet.send(&Request::Control { tid }, None).is_ok()
            && matches!(packet.receive::<Reply>(), Ok(Some((Reply::Done, _))));
        if ready.send(accepted).is_ok() && accepted {
            obey(driver, &packet);
        }
    };
    spawn_quiet("cuda-checkpoint", work).map_err(|_| NO_DEVICE)?;
    if started.recv() == Ok(true) { Ok(fd) } else { Err(NO_DEVICE) }
}

fn obey(driver: &'static Driver, packet: &Packet) {
    while let Ok(Some((order, memory))) = packet.receive::<Order>() {
        let report = match order {
            Order::Lock { timeout_ms } => plain(lock(driver, timeout_ms)),
            Order::Save { extra_bytes } => save(driver, extra_bytes),
            Order::Map { object } => plain(
                memory
                    .ok_or(code::UNKNOWN)
                    .and_then(|memory| driver.memory().refill(object, &memory)),
            ),
            Order::Resume { gpu_map } => {
                let outcome = driver.tools.resume();
                if outcome.is_ok() {
                    driver.resume(&gpu_map);
                    driver.gate.back();
                }
                plain(outcome)
            }
            Order::Unlock => {
                driver.gate.open();
                Report::default()
            }
        };
        if packet.send(&report, None).is_err() {
            return;
        }
    }
}

fn plain(outcome: Outcome) -> Report {
    Report { code: status(outcome), restore_code: 0 }
}

fn lock(driver: &Driver, timeout_ms: u32) -> Outcome {
    let deadline =
        (timeout_ms > 0).then(|| Instant::now() + Duration::from_millis(timeout_ms.into()));
    if !driver.gate.close(deadline) {
        return Err(code::NOT_READY);
    }
    if !driver.streams.wait_idle(None, deadline) {
        driver.gate.open();
        return Err(code::NOT_READY);
    }
    Ok(())
}

fn save(driver: &Driver, extra_bytes: u64) -> Report {
    let peer_access = driver.contexts().peer_access_before_checkpoint();
    let mut memory = driver.memory();
    match memory.save(extra_bytes as usize) {
        Ok(shared_memory) => {
            driver.gate.leave();
            let of_tools = driver.tools.save();
            let restore_code = match (peer_access, of_tools) {
                (true, _) => code::INVALID_VALUE,
                (false, 0) => shared_memory,
                (false, of_tools) => of_tools,
            };
            Report { code: 0, restore_code }
        }
        Err(code) => Report { code, restore_code: 0 },
    }
}

/// Starts a thread of the driver. The thread blocks all signals, so that they reach the
/// application's threads.
pub fn spawn_quiet(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: the signal sets are plain data, which the calls below fill. The new thread inherits
    // the mask that blocks all signals, and this thread's mask is restored afterwards.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        spawned.map(drop)
    }
}
