//! Tests of the recording of CUDA calls, through the real thunk in a real process.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use affinode_cuda_sys::hook;
use affinode_proto::wire::call_ring::{CallRecord, CallRingReader, SAMPLE_EVERY};
use affinode_proto::wire::counters::{CounterSnapshot, MAX_CALL_COST_PS, PAGE_BYTES};
use affinode_proto::wire::message::{Action, ControllerMessage};
use support::controller::{CLOSE, Connection, Controller};
use support::{Build, Client};

struct Watched {
    client: Client,
    agent: Connection,
    reader: CallRingReader,
}

fn registered(controller: &Controller) -> Watched {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let agent = controller.welcome();
    Watched { client, agent, reader: CallRingReader::default() }
}

impl Watched {
    fn page(&self) -> Box<[u8; PAGE_BYTES]> {
        let mut page = Box::new([0; PAGE_BYTES]);
        self.agent.page.read_exact_at(&mut *page, 0).unwrap();
        page
    }

    fn wait_for_one_in(&self, expected: u32) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.page()[SAMPLE_EVERY..SAMPLE_EVERY + 4] != expected.to_ne_bytes() {
            assert!(Instant::now() < end, "the agent does not record one call in {expected}");
            std::thread::yield_now();
        }
    }

    fn watch(&mut self, one_in: u32) {
        let read = self.reader.read();
        self.agent.send(ControllerMessage::SampleCalls { one_in, read });
        self.wait_for_one_in(one_in);
    }

    fn taken(&mut self) -> Vec<CallRecord> {
        let page = self.page();
        let mut taken = Vec::new();
        let news = self.reader.take(&page, |record| taken.push(record));
        assert_eq!((news.dropped, news.torn), (0, 0));
        taken
    }

    fn names(&mut self) -> Vec<&'static str> {
        self.taken().iter().map(|r| hook::name(r.hook.into()).unwrap_or("?")).collect()
    }
}

#[test]
fn overhead_is_measured_without_counted_calls() {
    let controller = Controller::new();
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    let agent = controller.welcome();
    let mut page = Box::new([0; PAGE_BYTES]);
    agent.page.read_exact_at(&mut *page, 0).unwrap();
    let snapshot = CounterSnapshot::decode(&*page).unwrap();
    assert!((1..MAX_CALL_COST_PS).contains(&snapshot.call_cost_ps), "{snapshot:?}");
    assert!(snapshot.calls + snapshot.polls < 100, "the calls of the measurement are not counted");
    assert_eq!((snapshot.inflight, snapshot.held_us), (0, 0));
    println!("a hooked call costs {} ps more", snapshot.call_cost_ps);
}

#[test]
fn calls_are_recorded_only_while_watched() {
    let controller = Controller::new();
    let mut w = registered(&controller);
    w.client.ask("cuLaunchKernel");
    assert!(w.taken().is_empty());
    w.watch(1);
    for call in ["cuLaunchKernel", "cuStreamQuery", "cuMemAlloc", "cuCtxSynchronize"] {
        w.client.ask(call);
    }
    // For `cuMemAlloc` the client calls `cuMemAlloc_v2`.
    let names = w.names();
    assert_eq!(names[..2], ["cuLaunchKernel", "cuStreamQuery"]);
    assert!(names[2].starts_with("cuMemAlloc") && names[3] == "cuCtxSynchronize", "{names:?}");
    w.watch(0);
    w.client.ask("cuLaunchKernel");
    assert!(w.taken().is_empty());
    w.client.finish();
}

#[test]
fn record_has_thread_duration_and_result() {
    let controller = Controller::new();
    let mut w = registered(&controller);
    w.watch(1);
    w.client.ask("short 1");
    assert_eq!(w.client.ask("cuMemAlloc"), 2);
    w.client.ask("start cuStubBlock");
    w.client.ask("inside 1");
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(5) {
        std::thread::yield_now();
    }
    w.client.ask("release");
    w.client.ask("join");
    let taken = w.taken();
    let [failed, blocked] = taken.as_slice() else { panic!("{taken:?}") };
    assert_eq!((failed.result, failed.stands_for, failed.thread), (2, 1, w.client.pid()));
    assert_ne!(blocked.thread, w.client.pid(), "another thread's");
    assert!(blocked.duration_ns > 5_000_000, "{blocked:?}");
    w.client.finish();
}

#[test]
fn sums_are_whole_when_one_in_many_is_taken() {
    let controller = Controller::new();
    let mut w = registered(&controller);
    w.watch(1);
    w.client.ask("cuLaunchKernel");
    w.watch(8);
    for _ in 0..200 {
        w.client.ask("cuLaunchKernel");
    }
    let fewer = w.taken();
    w.watch(1);
    // When the sampling changes, the thread must not skip further calls, and its next record must
    // count the calls that it has skipped.
    w.client.ask("cuLaunchKernel");
    let rest = w.taken();
    assert!(fewer.len() < 100, "{} records", fewer.len());
    let sum: u32 = fewer.iter().chain(&rest).map(|record| record.stands_for).sum();
    assert_eq!(sum, 202);
    w.client.finish();
}

#[test]
fn a_watched_process_is_held_and_goes_on_as_ever() {
    let controller = Controller::new();
    let mut w = registered(&controller);
    w.watch(1);
    w.agent.done(&[CLOSE]);
    w.client.send("cuLaunchKernel");
    w.agent.wake();
    assert!(w.taken().is_empty(), "the waiting call is not in the driver");
    w.agent.done(&[Action::Open]);
    assert_eq!(w.client.answer(), 0);
    assert_eq!(w.names(), ["cuLaunchKernel"]);
    w.client.finish();
}

#[test]
fn the_watch_ends_with_the_connection() {
    let controller = Controller::new();
    let mut w = registered(&controller);
    w.watch(1);
    w.agent.stream.shutdown(std::net::Shutdown::Both).unwrap();
    w.wait_for_one_in(0);
    w.client.finish();
}
