//! Tests of the registry of copiers without a node: attachments, reports and ends of copiers.

use affinode_proto::wire::copier::CopierReport;

use super::*;

const GPU: &str = "GPU-1";

/// Creates a registry with one copier that is ready. Returns the registry and the copier's id.
fn with_copier() -> (CopierRegistry, CopierId) {
    let mut copiers = CopierRegistry::default();
    let id = next_copier(&mut copiers);
    (copiers, id)
}

/// Starts a further copier, makes it ready at once and returns its id.
fn next_copier(copiers: &mut CopierRegistry) -> CopierId {
    assert!(copiers.start(0, GPU, &mut Vec::new()));
    let id = copiers.by_gpu[GPU].id;
    copiers.report(id, CopierReport::Ready);
    id
}

impl CopierRegistry {
    fn attach_one(&mut self, process: u64, domain: Option<Domain>, ahead: bool) -> Vec<Effect> {
        let (mut effects, process) = (Vec::new(), (ProcessId(process), GPU));
        assert!(self.attach(0, process, 100, domain, ahead, &mut effects));
        effects
    }

    fn fills(&mut self, process: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        self.fill(0, ProcessId(process), 100, &mut effects);
        effects
    }

    /// Whether the copier is ended because a container waits for VRAM. `leaves`: whether the
    /// attached process is about to free VRAM itself.
    fn ends_for_room(&mut self, leaves: bool) -> bool {
        let mut effects = Vec::new();
        self.make_room(0, &[GPU.to_owned()].into(), |_| leaves, &mut effects);
        let ended = !effects.is_empty();
        assert_eq!(ended, self.by_gpu.is_empty());
        ended
    }

    /// The figures that users see for the GPU: prefaulted, registering, registered, offloads.
    fn shown(&self) -> (u32, u32, u32, u64) {
        let figures = self.figures(GPU);
        (figures.prefaulted, figures.registering, figures.registered, figures.offloads)
    }
}

fn registered(process: u64) -> CopierReport {
    CopierReport::Registered { process, bytes: 100 }
}

fn prefaulted(process: u64) -> CopierReport {
    CopierReport::Prefaulted { process, bytes: 100 }
}

fn copied(process: u64) -> CopierReport {
    CopierReport::Copied { process, bytes: 100, elapsed_us: 1 }
}

/// Id of a copier that does not exist.
const OTHER: CopierId = CopierId(99);

#[test]
fn only_registered_processes_are_filled() {
    let (mut copiers, id) = with_copier();
    let attach =
        Effect::AttachCopier { copier: id, process: ProcessId(7), most_bytes: 100, domain: 0 };
    assert_eq!(copiers.attach_one(7, None, false), [attach]);
    assert_eq!(copiers.fills(7), [], "the process's memory is not registered yet");
    copiers.report(OTHER, registered(7));
    assert_eq!(copiers.fills(7), [], "the report is from another copier");
    copiers.report(id, registered(7));
    let fill = Effect::FillMemory { copier: id, process: ProcessId(7), most_bytes: 100 };
    assert_eq!(copiers.fills(7), [fill]);
    copiers.report(id, CopierReport::Detached { process: 7 });
    assert_eq!(copiers.fills(7), [], "the process is detached");
}

fn of_namespace(pod: &str) -> Option<Domain> {
    Some(Domain::Containers { containerd: "k8s.io".into(), pod: pod.into() })
}

#[test]
fn processes_of_a_domain_share_its_number() {
    let (mut copiers, id) = with_copier();
    let mut number = |process, domain, ahead| match copiers.attach_one(process, domain, ahead)[..] {
        [Effect::AttachCopier { domain, .. }] => domain,
        ref other => panic!("{other:?}"),
    };
    assert_eq!(number(1, None, false), 0);
    assert_eq!(number(2, of_namespace("ml"), false), 1);
    assert_eq!(number(3, of_namespace("web"), true), 2);
    assert_eq!(number(4, of_namespace("ml"), true), 1);
    let jobs = |uid| Some(Domain::Jobs { uid, namespace: "ml".into() });
    assert_eq!((number(5, jobs(0), false), number(6, jobs(1), false)), (3, 4));
    // When all processes of a domain have ended, the domain must keep its number, even if another
    // copier is started.
    copiers.exited(0, id, &mut Vec::new());
    next_copier(&mut copiers);
    let effects = copiers.attach_one(7, of_namespace("new"), false);
    assert!(matches!(effects[..], [Effect::AttachCopier { domain: 5, .. }]), "{effects:?}");
}

#[test]
fn pressure_ends_the_copier_of_that_gpu() {
    let (mut copiers, id) = with_copier();
    copiers.attach_one(7, None, false);
    let mut effects = Vec::new();
    copiers.make_room(0, &["GPU-2".to_owned()].into(), |_| false, &mut effects);
    assert_eq!(effects, []);
    copiers.make_room(0, &[GPU.to_owned()].into(), |_| false, &mut effects);
    assert_eq!(effects, [Effect::EndCopier { copier: id, why: CopierEnd::MakesRoom }]);
    assert!(copiers.by_gpu.is_empty() && copiers.attached.is_empty());
}

#[test]
fn copier_that_never_was_ready_backs_off() {
    let mut copiers = CopierRegistry::default();
    let mut effects = Vec::new();
    assert!(copiers.start(0, GPU, &mut effects));
    copiers.ended(10, CopierId(1), &mut effects);
    let why = CopierEnd::NeverReady { pause_ms: 5_000 };
    assert_eq!(effects.pop(), Some(Effect::EndCopier { copier: CopierId(1), why }));
    assert!(!copiers.start(5_009, GPU, &mut effects));
    assert!(copiers.start(5_010, GPU, &mut effects));
    let start = Effect::StartCopier { copier: CopierId(2), gpu: GPU.into() };
    assert_eq!(effects.pop(), Some(start), "the second copier has a new number");
    copiers.tick(5_010 + START_MS, &mut effects);
    let why = CopierEnd::NeverReady { pause_ms: 10_000 };
    assert_eq!(
        effects.pop(),
        Some(Effect::EndCopier { copier: CopierId(2), why }),
        "the second copier is not ready in time"
    );
}

#[test]
fn starting_and_ending_copiers_move_memory() {
    let mut copiers = CopierRegistry::default();
    assert!(!copiers.is_moving(0));
    assert!(copiers.start(0, GPU, &mut Vec::new()));
    assert!(copiers.is_moving(0) && !copiers.has_ready(GPU));
    copiers.report(CopierId(1), CopierReport::Ready);
    assert!(!copiers.is_moving(0) && copiers.has_ready(GPU));
    copiers.ended(0, CopierId(1), &mut Vec::new());
    assert!(copiers.is_moving(END_MS - 1), "the ended copier may still hold memory");
    assert!(!copiers.is_moving(END_MS), "the ended copier is ignored after END_MS");
    copiers.exited(1, CopierId(1), &mut Vec::new());
    assert!(!copiers.is_moving(1));
}

/// A copier whose process exits is removed at once, even if the controller sees the exit before the
/// end of the copier's connection.
#[test]
fn copier_that_exits_first_is_gone_at_once() {
    let (mut copiers, id) = with_copier();
    let mut effects = Vec::new();
    copiers.exited(0, id, &mut effects);
    assert_eq!(effects, [Effect::EndCopier { copier: id, why: CopierEnd::Lost }]);
    copiers.ended(0, id, &mut effects);
    assert!(effects.len() == 1 && !copiers.is_moving(0));
}

#[test]
fn hold_is_told_once_to_each_copier() {
    let (mut copiers, first) = with_copier();
    let mut effects = Vec::new();
    copiers.hold(true, &mut effects);
    copiers.hold(true, &mut effects);
    assert_eq!(effects, [Effect::HoldCopier { copier: first, on: true }]);
    effects.clear();
    assert!(copiers.start(0, "GPU-2", &mut effects));
    let second = Effect::HoldCopier { copier: CopierId(2), on: true };
    assert_eq!(effects[1..], [second], "a new copier starts");
    effects.clear();
    copiers.hold(false, &mut effects);
    assert_eq!(effects.len(), 2);
}

#[test]
fn a_filling_copier_is_not_ended() {
    let (mut copiers, id) = with_copier();
    copiers.attach_one(7, None, false);
    copiers.report(id, registered(7));
    copiers.fills(7);
    assert!(!copiers.ends_for_room(false));
    copiers.report(id, CopierReport::Filled { process: 7, bytes: 100, elapsed_us: 1 });
    assert!(copiers.ends_for_room(false));
}

#[test]
fn a_copying_copier_is_not_ended() {
    let (mut copiers, id) = with_copier();
    copiers.attach_one(7, None, true);
    copiers.report(id, prefaulted(7));
    assert!(!copiers.ends_for_room(true));
    assert!(copiers.was_attached_ahead(ProcessId(7), GPU));
    assert!(!copiers.ends_for_room(true));
    copiers.report(id, copied(7));
    assert!(copiers.ends_for_room(true), "it has copied");

    for (is_prefaulted, leaves) in [(true, false), (false, true)] {
        let id = next_copier(&mut copiers);
        copiers.attach_one(7, None, true);
        if is_prefaulted {
            copiers.report(id, prefaulted(7));
        }
        assert!(copiers.ends_for_room(leaves), "no process leaves, or nothing is prefaulted");
    }
}

#[test]
fn unused_copier_ends_after_a_while() {
    let (mut copiers, id) = with_copier();
    let mut effects = Vec::new();
    copiers.attach_one(7, None, false);
    copiers.tick(LINGER_MS, &mut effects);
    copiers.report(id, CopierReport::Detached { process: 7 });
    copiers.tick(2 * LINGER_MS - 1, &mut effects);
    assert_eq!(effects, []);
    copiers.tick(2 * LINGER_MS, &mut effects);
    assert_eq!(effects, [Effect::EndCopier { copier: id, why: CopierEnd::Unused }]);
}

#[test]
fn a_resident_process_counts_as_prefaulted() {
    let (mut copiers, id) = with_copier();
    copiers.attach_one(7, None, true);
    assert_eq!(copiers.shown(), (0, 1, 0, 0), "the process's memory is being registered");
    copiers.report(OTHER, prefaulted(7));
    assert_eq!(copiers.shown(), (0, 1, 0, 0), "the report is from another copier");
    copiers.report(id, prefaulted(7));
    assert_eq!(copiers.shown(), (1, 0, 0, 0));
    assert!(copiers.was_attached_ahead(ProcessId(7), GPU));
    assert_eq!(copiers.shown(), (0, 1, 0, 0), "the process is being offloaded");
    copiers.report(OTHER, copied(7));
    assert_eq!(copiers.shown(), (0, 1, 0, 0), "the report is from another copier");
    copiers.report(id, copied(7));
    assert_eq!(copiers.shown(), (0, 1, 0, 1));
    copiers.report(id, registered(7));
    assert_eq!(copiers.shown(), (0, 0, 1, 1));
    copiers.report(id, CopierReport::Detached { process: 7 });
    assert_eq!(copiers.shown(), (0, 1, 0, 1), "the process's memory is being unregistered");
    copiers.report(id, CopierReport::Released);
    assert_eq!(copiers.shown(), (0, 0, 0, 1));
}

#[test]
fn a_prefaulted_process_keeps_its_copier() {
    let (mut copiers, id) = with_copier();
    let process = ProcessId(7);
    assert!(!copiers.was_attached_ahead(process, GPU));
    copiers.attach_one(7, None, true);
    assert!(
        !copiers.was_attached_ahead(process, "GPU-2"),
        "the process is offloaded from another GPU"
    );
    assert!(copiers.was_attached_ahead(process, GPU));
    assert!(!copiers.was_attached_ahead(process, GPU), "an attachment counts for one offload");
    copiers.attach_one(7, None, false);
    assert!(
        !copiers.was_attached_ahead(process, GPU),
        "the process was attached during its offload"
    );

    copiers.attach_one(7, None, true);
    copiers.detach(process);
    copiers.report(id, prefaulted(7));
    assert_eq!(copiers.shown(), (0, 0, 0, 0));
    assert!(!copiers.was_attached_ahead(process, GPU), "the process was detached");

    copiers.attach_one(7, None, true);
    copiers.exited(0, id, &mut Vec::new());
    next_copier(&mut copiers);
    assert!(!copiers.was_attached_ahead(process, GPU), "the copier of the process has exited");
}

#[test]
fn shared_bytes_last_while_processes_stay() {
    let (mut copiers, id) = with_copier();
    let shown = |copiers: &CopierRegistry, uuid: &str| {
        let figures = copiers.figures(uuid);
        (figures.shared_bytes, figures.stored_bytes)
    };
    for process in [7, 8] {
        copiers.attach_one(process, of_namespace("ml"), false);
    }
    let shared =
        |process, bytes, stored_bytes| CopierReport::Shared { process, bytes, stored_bytes };
    copiers.report(id, shared(7, 30, 30));
    copiers.report(id, shared(8, 30, 30));
    assert_eq!(shown(&copiers, GPU), (60, 30));
    copiers.report(OTHER, shared(8, 90, 90));
    assert_eq!(shown(&copiers, GPU), (60, 30), "the report is from another copier");
    assert_eq!(shown(&copiers, "GPU-2"), (0, 0));
    copiers.report(id, shared(7, 50, 40));
    assert_eq!(shown(&copiers, GPU), (80, 40), "the latest report counts");
    copiers.report(id, CopierReport::Detached { process: 7 });
    assert_eq!(shown(&copiers, GPU), (30, 40));
    copiers.report(id, shared(7, 50, 35));
    assert_eq!(shown(&copiers, GPU), (30, 35), "a report after the detachment counts");
    copiers.report(id, CopierReport::Detached { process: 8 });
    assert_eq!(shown(&copiers, GPU), (0, 0));

    copiers.attach_one(7, of_namespace("ml"), false);
    copiers.report(id, shared(7, 50, 40));
    assert_eq!(shown(&copiers, GPU), (50, 40));
    copiers.exited(0, id, &mut Vec::new());
    assert_eq!(shown(&copiers, GPU), (0, 0), "the copier of the process has exited");
    next_copier(&mut copiers);
    assert_eq!(shown(&copiers, GPU), (0, 0), "the next copier has stored nothing");
}
