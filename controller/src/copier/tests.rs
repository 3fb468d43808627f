//! Copiers whose other ends are held by the test.

use std::path::Path;

use affinode_proto::wire::message::FRAME_BYTES;
use tokio::process::Command;

use super::*;

const GPU: &str = "GPU-1";

fn copiers() -> (Copiers, mpsc::UnboundedReceiver<CopierMessage>) {
    let (mail, from) = mpsc::unbounded_channel();
    (Copiers::new(true, DriverLibrary::new("libcuda.so.1", Path::new("")), mail), from)
}

/// Adds a copier whose other end the test holds.
fn with_copier(copiers: &mut Copiers) -> OwnedFd {
    let (ours, theirs) = pair().unwrap();
    let child = CopierProcess::of_test(ours);
    let idle_since = Instant::now();
    copiers.of.insert(
        GPU.into(),
        CopierState {
            number: 1,
            child,
            is_ready: true,
            idle_since,
            vram_bytes: 0,
            lets_go: false,
            filling: None,
            stored_bytes: 0,
            started: idle_since,
        },
    );
    theirs
}

fn said(number: u64, said: CopierReport) -> CopierMessage {
    CopierMessage { uuid: GPU.into(), number, said: Some(said) }
}

fn order(copier: &OwnedFd) -> Option<CopierOrder> {
    let (frame, _): ([u8; FRAME_BYTES], _) = socket::receive(copier).ok()?;
    CopierOrder::decode(&frame).ok()
}

#[tokio::test]
async fn only_registered_processes_are_filled() {
    let (mut copiers, _from) = copiers();
    let copier = with_copier(&mut copiers);
    let process = ProcessId(7);
    assert!(copiers.attach(process, GPU, 100, None).is_some());
    assert_eq!(
        order(&copier),
        Some(CopierOrder::Attach { process: 7, most_bytes: 100, domain: 0 })
    );
    copiers.fill(process, 100);
    assert_eq!(order(&copier), None, "its memory is not registered yet");
    copiers.received(said(9, CopierReport::Registered { process: 7, bytes: 100 }));
    copiers.fill(process, 100);
    assert_eq!(order(&copier), None, "another copier's word");
    copiers.received(said(1, CopierReport::Registered { process: 7, bytes: 100 }));
    copiers.fill(process, 100);
    assert_eq!(order(&copier), Some(CopierOrder::Fill { process: 7, most_bytes: 100 }));
    copiers.received(said(1, CopierReport::Detached { process: 7 }));
    copiers.fill(process, 100);
    assert_eq!(order(&copier), None, "it hung up");
}

fn of_namespace(pod: &str) -> Option<Domain> {
    Some(Domain::Containers { containerd: "k8s.io".into(), pod: pod.into() })
}

#[tokio::test]
async fn processes_of_a_domain_share_its_number() {
    let (mut copiers, _from) = copiers();
    let copier = with_copier(&mut copiers);
    let mut number = |process, domain, ahead| {
        let process = ProcessId(process);
        let way = if ahead {
            copiers.prepare(process, GPU, 100, domain)
        } else {
            copiers.attach(process, GPU, 100, domain)
        };
        assert!(way.is_some());
        match order(&copier) {
            Some(CopierOrder::Attach { domain, .. }) => domain,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(number(1, None, false), 0);
    assert_eq!(number(2, of_namespace("ml"), false), 1);
    assert_eq!(number(3, of_namespace("web"), true), 2);
    assert_eq!(number(4, of_namespace("ml"), true), 1);
    let jobs = |uid| Some(Domain::Jobs { uid, namespace: "ml".into() });
    assert_eq!((number(5, jobs(0), false), number(6, jobs(1), false)), (3, 4));
    // A process that was offloaded meanwhile keeps its number for itself.
    copiers.received(said(1, CopierReport::Detached { process: 3 }));
    copiers.received(CopierMessage { uuid: GPU.into(), number: 1, said: None });
    let copier = with_copier(&mut copiers);
    assert!(copiers.attach(ProcessId(7), GPU, 100, of_namespace("new")).is_some());
    assert_eq!(
        order(&copier),
        Some(CopierOrder::Attach { process: 7, most_bytes: 100, domain: 5 })
    );
}

#[tokio::test]
async fn pressure_ends_a_copier_and_backoff_holds() {
    let (mut copiers, _from) = copiers();
    let copier = with_copier(&mut copiers);
    assert!(copiers.attach(ProcessId(7), GPU, 100, None).is_some());
    copiers.make_room(&["GPU-2".to_owned()], |_| false);
    assert!(copiers.of.contains_key(GPU));
    copiers.make_room(&[GPU.to_owned()], |_| false);
    assert!(copiers.of.is_empty() && copiers.members.is_empty());
    assert!(order(&copier).is_some() && order(&copier).is_none(), "nothing more is told");

    let _copier = with_copier(&mut copiers);
    copiers.of.get_mut(GPU).unwrap().is_ready = false;
    copiers.received(CopierMessage { uuid: GPU.into(), number: 1, said: None });
    assert!(copiers.attach(ProcessId(8), GPU, 100, None).is_none());
}

#[tokio::test]
async fn nothing_takes_vram_beside_a_proof() {
    let (mut copiers, _from) = copiers();
    let copier = with_copier(&mut copiers);
    copiers.of.get_mut(GPU).unwrap().is_ready = false;
    assert!(copiers.is_moving() && !copiers.has_ready(GPU), "a proof waits for this one");
    copiers.received(said(1, CopierReport::Ready));
    assert!(!copiers.is_moving() && copiers.has_ready(GPU));
    copiers.hold(true);
    copiers.hold(true);
    assert_eq!(order(&copier), Some(CopierOrder::HoldVram { on: true }));
    assert_eq!(order(&copier), None, "it knows");
    copiers.hold(false);
    assert_eq!(order(&copier), Some(CopierOrder::HoldVram { on: false }));
}

#[tokio::test]
async fn an_ending_copier_counts_as_moving() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    let sleeper = Command::new("sleep").arg("600").spawn().unwrap();
    let place = format!("/proc/{}", sleeper.id().unwrap());
    copiers.of.get_mut(GPU).unwrap().child.of_process(sleeper);
    copiers.end(GPU);
    assert_eq!(copiers.ending.len(), 1);
    while copiers.is_moving() {
        tokio::task::yield_now().await;
    }
    assert!(copiers.ending.is_empty());
    assert!(!std::path::Path::new(&place).exists(), "not given up: it has ended");
}

#[tokio::test]
async fn a_filling_copier_is_not_ended() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    assert!(copiers.attach(ProcessId(7), GPU, 100, None).is_some());
    copiers.received(said(1, CopierReport::Registered { process: 7, bytes: 100 }));
    copiers.fill(ProcessId(7), 100);
    copiers.make_room(&[GPU.to_owned()], |_| false);
    assert!(copiers.of.contains_key(GPU));
    copiers.received(said(1, CopierReport::Filled { process: 7, bytes: 100, elapsed_us: 1 }));
    copiers.make_room(&[GPU.to_owned()], |_| false);
    assert!(copiers.of.is_empty());
}

#[tokio::test]
async fn a_disabled_copier_is_never_started() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    copiers.enabled = false;
    assert!(copiers.attach(ProcessId(7), GPU, 100, None).is_none());
}

/// The fields shown for the GPU: prefaulted, registering, registered, offloads.
fn shown(copiers: &Copiers) -> (u32, u32, u32, u64) {
    let mut gpu = control::Gpu { uuid: GPU.into(), ..control::Gpu::default() };
    copiers.show(&mut gpu);
    (gpu.copier_prefaulted, gpu.copier_registering, gpu.copier_registered, gpu.copier_offloads)
}

#[tokio::test]
async fn a_resident_process_counts_as_prefaulted() {
    let (mut copiers, _from) = copiers();
    let copier = with_copier(&mut copiers);
    assert!(copiers.prepare(ProcessId(7), GPU, 100, None).is_some());
    assert_eq!(
        order(&copier),
        Some(CopierOrder::Attach { process: 7, most_bytes: 100, domain: 0 })
    );
    assert_eq!(shown(&copiers), (0, 1, 0, 0), "it is getting hold of it");
    copiers.received(said(9, CopierReport::Prefaulted { process: 7, bytes: 100 }));
    assert_eq!(shown(&copiers), (0, 1, 0, 0), "another copier's word");
    copiers.received(said(1, CopierReport::Prefaulted { process: 7, bytes: 100 }));
    assert_eq!(shown(&copiers), (1, 0, 0, 0));
    assert!(copiers.was_shown(ProcessId(7), GPU));
    assert_eq!(shown(&copiers), (0, 1, 0, 0), "it leaves");
    copiers.received(said(9, CopierReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    assert_eq!(shown(&copiers), (0, 1, 0, 0), "another copier's word");
    copiers.received(said(1, CopierReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    assert_eq!(shown(&copiers), (0, 1, 0, 1));
    copiers.received(said(1, CopierReport::Registered { process: 7, bytes: 100 }));
    assert_eq!(shown(&copiers), (0, 0, 1, 1));
    copiers.received(said(1, CopierReport::Detached { process: 7 }));
    copiers.received(said(1, CopierReport::Released));
    assert_eq!(shown(&copiers), (0, 0, 0, 1));
}

#[tokio::test]
async fn shared_bytes_last_while_processes_stay() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    let shown = |copiers: &Copiers, uuid: &str| {
        let mut gpu = control::Gpu { uuid: uuid.into(), ..control::Gpu::default() };
        copiers.show(&mut gpu);
        (gpu.copier_shared_bytes, gpu.copier_stored_bytes)
    };
    for process in [7, 8] {
        assert!(copiers.attach(ProcessId(process), GPU, 100, of_namespace("ml")).is_some());
    }
    let shared =
        |process, bytes, stored_bytes| CopierReport::Shared { process, bytes, stored_bytes };
    copiers.received(said(1, shared(7, 30, 30)));
    copiers.received(said(1, shared(8, 30, 30)));
    assert_eq!(shown(&copiers, GPU), (60, 30));
    copiers.received(said(9, shared(8, 90, 90)));
    assert_eq!(shown(&copiers, GPU), (60, 30), "another copier's word");
    assert_eq!(shown(&copiers, "GPU-2"), (0, 0));
    copiers.received(said(1, shared(7, 50, 40)));
    assert_eq!(shown(&copiers, GPU), (80, 40), "the latest word counts");
    copiers.received(said(1, CopierReport::Detached { process: 7 }));
    assert_eq!(shown(&copiers, GPU), (30, 40));
    copiers.received(said(1, shared(7, 50, 35)));
    assert_eq!(shown(&copiers, GPU), (30, 35), "it has left, and what is stored is still news");
    copiers.received(said(1, CopierReport::Detached { process: 8 }));
    assert_eq!(shown(&copiers, GPU), (0, 0));

    assert!(copiers.attach(ProcessId(7), GPU, 100, of_namespace("ml")).is_some());
    copiers.received(said(1, shared(7, 50, 40)));
    assert_eq!(shown(&copiers, GPU), (50, 40));
    copiers.received(CopierMessage { uuid: GPU.into(), number: 1, said: None });
    assert_eq!(shown(&copiers, GPU), (0, 0), "that copier has ended");
    let _copier = with_copier(&mut copiers);
    assert_eq!(shown(&copiers, GPU), (0, 0), "the next begins anew");
}

#[tokio::test]
async fn a_prefaulted_process_keeps_its_copier() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    let process = ProcessId(7);
    assert!(!copiers.was_shown(process, GPU));
    assert!(copiers.prepare(process, GPU, 100, None).is_some());
    assert!(!copiers.was_shown(process, "GPU-2"), "it leaves another GPU");
    assert!(copiers.was_shown(process, GPU));
    assert!(!copiers.was_shown(process, GPU), "that was for one way out");
    assert!(copiers.attach(process, GPU, 100, None).is_some());
    assert!(!copiers.was_shown(process, GPU), "and this for another");

    assert!(copiers.prepare(process, GPU, 100, None).is_some());
    copiers.unprepare(process);
    copiers.received(said(1, CopierReport::Prefaulted { process: 7, bytes: 100 }));
    assert_eq!(shown(&copiers), (0, 0, 0, 0));
    assert!(!copiers.was_shown(process, GPU), "it was told that it is over");

    assert!(copiers.prepare(process, GPU, 100, None).is_some());
    copiers.received(CopierMessage { uuid: GPU.into(), number: 1, said: None });
    let _copier = with_copier(&mut copiers);
    assert!(!copiers.was_shown(process, GPU), "that copier has ended");
    assert!(copiers.attach(process, GPU, 100, None).is_some());
}

#[tokio::test]
async fn a_copying_copier_is_not_ended() {
    let (mut copiers, _from) = copiers();
    let _copier = with_copier(&mut copiers);
    let (seven, room) = (|process| process == ProcessId(7), [GPU.to_owned()]);
    assert!(copiers.prepare(ProcessId(7), GPU, 100, None).is_some());
    copiers.received(said(1, CopierReport::Prefaulted { process: 7, bytes: 100 }));
    copiers.make_room(&room, seven);
    assert!(copiers.was_shown(ProcessId(7), GPU));
    copiers.make_room(&room, seven);
    assert!(copiers.of.contains_key(GPU));
    copiers.received(said(1, CopierReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    copiers.make_room(&room, seven);
    assert!(copiers.of.is_empty(), "it has copied");

    for (says, leaves) in [(true, false), (false, true)] {
        let _copier = with_copier(&mut copiers);
        assert!(copiers.prepare(ProcessId(7), GPU, 100, None).is_some());
        if says {
            copiers.received(said(1, CopierReport::Prefaulted { process: 7, bytes: 100 }));
        }
        copiers.make_room(&room, |_| leaves);
        assert!(copiers.of.is_empty(), "no process is offloaded, or nothing is prefaulted");
    }
}
