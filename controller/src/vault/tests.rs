//! Vaults whose other ends are the test's.

use affinode_proto::wire::message::FRAME_BYTES;
use tokio::process::Command;

use super::*;

const GPU: &str = "GPU-1";

fn vaults() -> (Vaults, mpsc::UnboundedReceiver<VaultMail>) {
    let (mail, from) = mpsc::unbounded_channel();
    (Vaults::new(VaultSection::default(), mail), from)
}

/// A vault whose other end is ours.
fn with_vault(vaults: &mut Vaults) -> OwnedFd {
    let (ours, theirs) = pair().unwrap();
    let child = Child::of_test(ours);
    let idle_since = Instant::now();
    vaults.of.insert(
        GPU.into(),
        Vault {
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

fn said(number: u64, said: VaultReport) -> VaultMail {
    VaultMail { uuid: GPU.into(), number, said: Some(said) }
}

fn order(vault: &OwnedFd) -> Option<VaultOrder> {
    let (frame, _): ([u8; FRAME_BYTES], _) = socket::receive(vault).ok()?;
    VaultOrder::decode(&frame).ok()
}

#[tokio::test]
async fn who_is_held_is_filled_and_nobody_else() {
    let (mut vaults, _from) = vaults();
    let vault = with_vault(&mut vaults);
    let process = ProcessId(7);
    assert!(vaults.attach(process, GPU, 100, None).is_some());
    assert_eq!(order(&vault), Some(VaultOrder::Attach { process: 7, most_bytes: 100, domain: 0 }));
    vaults.fill(process, 100);
    assert_eq!(order(&vault), None, "its memory is not registered yet");
    vaults.heard(said(9, VaultReport::Held { process: 7, bytes: 100 }));
    vaults.fill(process, 100);
    assert_eq!(order(&vault), None, "another vault's word");
    vaults.heard(said(1, VaultReport::Held { process: 7, bytes: 100 }));
    vaults.fill(process, 100);
    assert_eq!(order(&vault), Some(VaultOrder::Fill { process: 7, most_bytes: 100 }));
    vaults.heard(said(1, VaultReport::Left { process: 7 }));
    vaults.fill(process, 100);
    assert_eq!(order(&vault), None, "it hung up");
}

fn of_namespace(pod: &str) -> Option<Domain> {
    Some(Domain::Containers { containerd: "k8s.io".into(), pod: pod.into() })
}

#[tokio::test]
async fn who_may_share_has_the_number_of_its_domain() {
    let (mut vaults, _from) = vaults();
    let vault = with_vault(&mut vaults);
    let mut number = |process, domain, ahead| {
        let process = ProcessId(process);
        let way = if ahead {
            vaults.prepare(process, GPU, 100, domain)
        } else {
            vaults.attach(process, GPU, 100, domain)
        };
        assert!(way.is_some());
        match order(&vault) {
            Some(VaultOrder::Attach { domain, .. }) => domain,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(number(1, None, false), 0);
    assert_eq!(number(2, of_namespace("ml"), false), 1);
    assert_eq!(number(3, of_namespace("web"), true), 2);
    assert_eq!(number(4, of_namespace("ml"), true), 1);
    let jobs = |uid| Some(Domain::Jobs { uid, namespace: "ml".into() });
    assert_eq!((number(5, jobs(0), false), number(6, jobs(1), false)), (3, 4));
    // Whoever has left meanwhile: its number is nobody else's.
    vaults.heard(said(1, VaultReport::Left { process: 3 }));
    vaults.heard(VaultMail { uuid: GPU.into(), number: 1, said: None });
    let vault = with_vault(&mut vaults);
    assert!(vaults.attach(ProcessId(7), GPU, 100, of_namespace("new")).is_some());
    assert_eq!(order(&vault), Some(VaultOrder::Attach { process: 7, most_bytes: 100, domain: 5 }));
}

#[tokio::test]
async fn room_is_made_by_ending_it_and_one_that_failed_is_left_alone() {
    let (mut vaults, _from) = vaults();
    let vault = with_vault(&mut vaults);
    assert!(vaults.attach(ProcessId(7), GPU, 100, None).is_some());
    vaults.make_room(&["GPU-2".to_owned()], |_| false);
    assert!(vaults.of.contains_key(GPU));
    vaults.make_room(&[GPU.to_owned()], |_| false);
    assert!(vaults.of.is_empty() && vaults.members.is_empty());
    assert!(order(&vault).is_some() && order(&vault).is_none(), "nothing more is told");

    let _vault = with_vault(&mut vaults);
    vaults.of.get_mut(GPU).unwrap().is_ready = false;
    vaults.heard(VaultMail { uuid: GPU.into(), number: 1, said: None });
    assert!(vaults.attach(ProcessId(8), GPU, 100, None).is_none());
}

#[tokio::test]
async fn nothing_takes_vram_beside_a_proof() {
    let (mut vaults, _from) = vaults();
    let vault = with_vault(&mut vaults);
    vaults.of.get_mut(GPU).unwrap().is_ready = false;
    assert!(vaults.is_moving() && !vaults.has_ready(GPU), "a proof waits for this one");
    vaults.heard(said(1, VaultReport::Ready));
    assert!(!vaults.is_moving() && vaults.has_ready(GPU));
    vaults.hold(true);
    vaults.hold(true);
    assert_eq!(order(&vault), Some(VaultOrder::Hold { on: true }));
    assert_eq!(order(&vault), None, "it knows");
    vaults.hold(false);
    assert_eq!(order(&vault), Some(VaultOrder::Hold { on: false }));
}

#[tokio::test]
async fn one_that_ends_is_waited_for_until_it_has() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    let sleeper = Command::new("sleep").arg("600").spawn().unwrap();
    let place = format!("/proc/{}", sleeper.id().unwrap());
    vaults.of.get_mut(GPU).unwrap().child.of_process(sleeper);
    vaults.end(GPU);
    assert_eq!(vaults.ending.len(), 1);
    while vaults.is_moving() {
        tokio::task::yield_now().await;
    }
    assert!(vaults.ending.is_empty());
    assert!(!std::path::Path::new(&place).exists(), "not given up: it has ended");
}

#[tokio::test]
async fn one_that_brings_somebody_home_is_left_to_do_so() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    assert!(vaults.attach(ProcessId(7), GPU, 100, None).is_some());
    vaults.heard(said(1, VaultReport::Held { process: 7, bytes: 100 }));
    vaults.fill(ProcessId(7), 100);
    vaults.make_room(&[GPU.to_owned()], |_| false);
    assert!(vaults.of.contains_key(GPU));
    vaults.heard(said(1, VaultReport::Filled { process: 7, bytes: 100, elapsed_us: 1 }));
    vaults.make_room(&[GPU.to_owned()], |_| false);
    assert!(vaults.of.is_empty());
}

#[tokio::test]
async fn where_it_is_turned_off_there_is_none() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    vaults.config.enabled = false;
    assert!(vaults.attach(ProcessId(7), GPU, 100, None).is_none());
}

/// What is shown of the GPU: prepared, pending, held, copies.
fn shown(vaults: &Vaults) -> (u32, u32, u32, u64) {
    let mut gpu = control::Gpu { uuid: GPU.into(), ..control::Gpu::default() };
    vaults.show(&mut gpu);
    (gpu.vault_prepared, gpu.vault_pending, gpu.vault_holds, gpu.vault_copies)
}

#[tokio::test]
async fn who_is_prepared_is_counted_so_while_it_is_at_home() {
    let (mut vaults, _from) = vaults();
    let vault = with_vault(&mut vaults);
    assert!(vaults.prepare(ProcessId(7), GPU, 100, None).is_some());
    assert_eq!(order(&vault), Some(VaultOrder::Attach { process: 7, most_bytes: 100, domain: 0 }));
    assert_eq!(shown(&vaults), (0, 1, 0, 0), "it is getting hold of it");
    vaults.heard(said(9, VaultReport::Prepared { process: 7, bytes: 100 }));
    assert_eq!(shown(&vaults), (0, 1, 0, 0), "another vault's word");
    vaults.heard(said(1, VaultReport::Prepared { process: 7, bytes: 100 }));
    assert_eq!(shown(&vaults), (1, 0, 0, 0));
    assert!(vaults.was_shown(ProcessId(7), GPU));
    assert_eq!(shown(&vaults), (0, 1, 0, 0), "it leaves");
    vaults.heard(said(9, VaultReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    assert_eq!(shown(&vaults), (0, 1, 0, 0), "another vault's word");
    vaults.heard(said(1, VaultReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    assert_eq!(shown(&vaults), (0, 1, 0, 1));
    vaults.heard(said(1, VaultReport::Held { process: 7, bytes: 100 }));
    assert_eq!(shown(&vaults), (0, 0, 1, 1));
    vaults.heard(said(1, VaultReport::Left { process: 7 }));
    vaults.heard(said(1, VaultReport::LetGo));
    assert_eq!(shown(&vaults), (0, 0, 0, 1));
}

#[tokio::test]
async fn what_is_held_together_is_shown_until_its_processes_have_left() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    let shown = |vaults: &Vaults, uuid: &str| {
        let mut gpu = control::Gpu { uuid: uuid.into(), ..control::Gpu::default() };
        vaults.show(&mut gpu);
        (gpu.vault_shared_bytes, gpu.vault_stored_bytes)
    };
    for process in [7, 8] {
        assert!(vaults.attach(ProcessId(process), GPU, 100, of_namespace("ml")).is_some());
    }
    let shared =
        |process, bytes, stored_bytes| VaultReport::Shared { process, bytes, stored_bytes };
    vaults.heard(said(1, shared(7, 30, 30)));
    vaults.heard(said(1, shared(8, 30, 30)));
    assert_eq!(shown(&vaults, GPU), (60, 30));
    vaults.heard(said(9, shared(8, 90, 90)));
    assert_eq!(shown(&vaults, GPU), (60, 30), "another vault's word");
    assert_eq!(shown(&vaults, "GPU-2"), (0, 0));
    vaults.heard(said(1, shared(7, 50, 40)));
    assert_eq!(shown(&vaults, GPU), (80, 40), "the latest word counts");
    vaults.heard(said(1, VaultReport::Left { process: 7 }));
    assert_eq!(shown(&vaults, GPU), (30, 40));
    vaults.heard(said(1, shared(7, 50, 35)));
    assert_eq!(shown(&vaults, GPU), (30, 35), "it has left, and what is stored is still news");
    vaults.heard(said(1, VaultReport::Left { process: 8 }));
    assert_eq!(shown(&vaults, GPU), (0, 0));

    assert!(vaults.attach(ProcessId(7), GPU, 100, of_namespace("ml")).is_some());
    vaults.heard(said(1, shared(7, 50, 40)));
    assert_eq!(shown(&vaults, GPU), (50, 40));
    vaults.heard(VaultMail { uuid: GPU.into(), number: 1, said: None });
    assert_eq!(shown(&vaults, GPU), (0, 0), "that vault has ended");
    let _vault = with_vault(&mut vaults);
    assert_eq!(shown(&vaults, GPU), (0, 0), "the next begins anew");
}

#[tokio::test]
async fn who_was_shown_its_vault_ahead_is_shown_none_when_it_leaves() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    let process = ProcessId(7);
    assert!(!vaults.was_shown(process, GPU));
    assert!(vaults.prepare(process, GPU, 100, None).is_some());
    assert!(!vaults.was_shown(process, "GPU-2"), "it leaves another GPU");
    assert!(vaults.was_shown(process, GPU));
    assert!(!vaults.was_shown(process, GPU), "that was for one way out");
    assert!(vaults.attach(process, GPU, 100, None).is_some());
    assert!(!vaults.was_shown(process, GPU), "and this for another");

    assert!(vaults.prepare(process, GPU, 100, None).is_some());
    vaults.unprepare(process);
    vaults.heard(said(1, VaultReport::Prepared { process: 7, bytes: 100 }));
    assert_eq!(shown(&vaults), (0, 0, 0, 0));
    assert!(!vaults.was_shown(process, GPU), "it was told that it is over");

    assert!(vaults.prepare(process, GPU, 100, None).is_some());
    vaults.heard(VaultMail { uuid: GPU.into(), number: 1, said: None });
    let _vault = with_vault(&mut vaults);
    assert!(!vaults.was_shown(process, GPU), "that vault has ended");
    assert!(vaults.attach(process, GPU, 100, None).is_some());
}

#[tokio::test]
async fn one_that_copies_who_leaves_is_left_to_do_so() {
    let (mut vaults, _from) = vaults();
    let _vault = with_vault(&mut vaults);
    let (seven, room) = (|process| process == ProcessId(7), [GPU.to_owned()]);
    assert!(vaults.prepare(ProcessId(7), GPU, 100, None).is_some());
    vaults.heard(said(1, VaultReport::Prepared { process: 7, bytes: 100 }));
    vaults.make_room(&room, seven);
    assert!(vaults.was_shown(ProcessId(7), GPU));
    vaults.make_room(&room, seven);
    assert!(vaults.of.contains_key(GPU));
    vaults.heard(said(1, VaultReport::Copied { process: 7, bytes: 100, elapsed_us: 1 }));
    vaults.make_room(&room, seven);
    assert!(vaults.of.is_empty(), "it has copied");

    for (says, leaves) in [(true, false), (false, true)] {
        let _vault = with_vault(&mut vaults);
        assert!(vaults.prepare(ProcessId(7), GPU, 100, None).is_some());
        if says {
            vaults.heard(said(1, VaultReport::Prepared { process: 7, bytes: 100 }));
        }
        vaults.make_room(&room, |_| leaves);
        assert!(vaults.of.is_empty(), "nobody leaves, or nothing is prepared");
    }
}
