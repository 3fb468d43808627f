use affinode_proto::api::control::Announcement;
use proptest::prelude::*;

use super::*;

/// Present time in the tests, in milliseconds since 1970.
const NOW: i64 = 1_700_000_000_000;

fn container(pod: &str, name: &str, state: State) -> Container {
    let announcement = Announcement {
        pod_namespace: "ml".into(),
        pod: pod.into(),
        pod_uid: format!("uid-of-{pod}"),
        container: name.into(),
        ..Announcement::default()
    };
    Container {
        announcement: Some(announcement).into(),
        state: state.as_str().into(),
        since_unix_ms: NOW,
        reason: "idle-timeout".into(),
        reason_text: "the container made no CUDA call for the idle timeout".into(),
        ..Container::default()
    }
}

fn list(containers: &[Container]) -> ListResponse {
    ListResponse { containers: containers.to_vec(), ..ListResponse::default() }
}

/// Carries out the changes that are due, and returns the affected pods. Each pod has its new state,
/// or `None` if its condition was removed.
fn write(
    board: &mut PodStatusWriter,
    list: &ListResponse,
    now_ms: i64,
) -> Vec<(String, Option<State>)> {
    let due = board.due(list, now_ms);
    let told = due.iter().map(|change| match change {
        ConditionChange::Show(name, standing) => (name.name.clone(), Some(standing.state)),
        ConditionChange::Clear(name) => (name.name.clone(), None),
    });
    let told = told.collect();
    due.into_iter().for_each(|change| board.done(change, now_ms));
    told
}

#[test]
fn a_pod_says_where_its_gpu_memory_is_and_why() {
    let mut offloaded = container("notebook", "jupyter", State::Offloaded);
    offloaded.offloaded_bytes = 3 << 29;
    let due = PodStatusWriter::default().due(&list(&[offloaded]), NOW);
    let [ConditionChange::Show(name, standing)] = &due[..] else { panic!("{due:?}") };
    assert_eq!((&*name.namespace, &*name.name, &*name.uid), ("ml", "notebook", "uid-of-notebook"));
    assert!(!standing.is_resident());
    assert_eq!(standing.reason, "IdleTimeout");
    assert_eq!(
        standing.message,
        "jupyter is Offloaded, 1.5 GiB in host memory: the container made no CUDA call for the \
         idle timeout"
    );
}

#[test]
fn transient_state_is_not_shown() {
    let mut board = PodStatusWriter::default();
    let at = |state| list(&[container("a", "main", state)]);
    assert_eq!(write(&mut board, &at(State::Unregistered), NOW), []);
    assert_eq!(
        write(&mut board, &at(State::Offloaded), NOW),
        [("a".into(), Some(State::Offloaded))]
    );
    for state in [State::Queued, State::Restoring, State::Closing, State::Offloading] {
        assert_eq!(write(&mut board, &at(state), NOW + SETTLED_MS - 1), [], "{state}");
    }
    let queued = at(State::Queued);
    let waits = [("a".into(), Some(State::Queued))];
    assert_eq!(write(&mut board, &queued, NOW + SETTLED_MS), waits);
    assert_eq!(write(&mut board, &queued, NOW + 2 * SETTLED_MS), [], "one write");
}

#[test]
fn changed_reason_is_written_changed_size_is_not() {
    let mut board = PodStatusWriter::default();
    let mut idle = container("a", "main", State::Idle);
    assert_eq!(write(&mut board, &list(&[idle.clone()]), NOW).len(), 1);
    idle.vram_bytes = 1 << 30;
    idle.since_unix_ms += 1;
    assert_eq!(write(&mut board, &list(&[idle.clone()]), NOW).len(), 0);
    idle.reason = "managed-memory".into();
    let due = board.due(&list(&[idle]), NOW);
    let [ConditionChange::Show(_, standing)] = &due[..] else { panic!("{due:?}") };
    assert_eq!(standing.reason, "ManagedMemory");
    assert_eq!(standing.since_ms, NOW, "the condition's status has not changed since NOW");
}

#[test]
fn container_in_heaviest_use_counts() {
    let both = [container("a", "side", State::Offloaded), container("a", "main", State::Active)];
    let due = PodStatusWriter::default().due(&list(&both), NOW);
    let [ConditionChange::Show(_, standing)] = &due[..] else { panic!("{due:?}") };
    assert_eq!(standing.state, State::Active);
    assert!(standing.message.contains("side is Offloaded: "), "{}", standing.message);
    assert!(standing.message.contains("main is Active: "), "{}", standing.message);
}

#[test]
fn condition_is_cleared_after_containers_end() {
    let mut board = PodStatusWriter::default();
    let there = list(&[container("a", "main", State::Active)]);
    write(&mut board, &there, NOW);
    assert_eq!(write(&mut board, &list(&[]), NOW + GONE_MS - 1), []);
    assert_eq!(write(&mut board, &there, NOW + GONE_MS), [], "the container is listed again");
    assert_eq!(write(&mut board, &list(&[]), NOW + 2 * GONE_MS), [("a".into(), None)]);
    assert_eq!(write(&mut board, &list(&[]), NOW + 3 * GONE_MS), []);
}

#[test]
fn container_outside_a_pod_is_not_written() {
    let mut outside = container("a", "main", State::Active);
    outside.announcement.mut_or_insert_default().pod_uid.clear();
    let mut strange = container("a", "main", State::Active);
    strange.announcement.mut_or_insert_default().pod = "../../secrets/x".into();
    assert_eq!(PodStatusWriter::default().due(&list(&[outside, strange]), NOW), []);
}

#[test]
fn frequent_changes_are_rate_limited() {
    let mut board = PodStatusWriter::default();
    let mut writes = 0;
    let (minutes, mut last) = (30, None);
    for second in 0..minutes * 60 {
        let state = if second % 2 == 0 { State::Active } else { State::Idle };
        let told = write(&mut board, &list(&[container("a", "main", state)]), NOW + second * 1000);
        writes += told.len();
        last = told.first().and_then(|(_, state)| *state).or(last);
    }
    assert!((20..=40).contains(&writes), "{writes} writes in {minutes} minutes");
    let end = NOW + (minutes + 2) * 60_000;
    let told = write(&mut board, &list(&[container("a", "main", State::Offloaded)]), end);
    assert_eq!(told, [("a".into(), Some(State::Offloaded))], "after {last:?}");
}

/// The API server refuses the removal of a condition. It must not be requested at each call.
#[test]
fn failing_clear_is_rate_limited() {
    let mut board = PodStatusWriter::default();
    write(&mut board, &list(&[container("a", "main", State::Active)]), NOW);
    let minutes = 30;
    let attempts: usize = (0..minutes * 60)
        .map(|second| board.due(&list(&[]), NOW + GONE_MS + second * 1000).len())
        .sum();
    assert!((20..=40).contains(&attempts), "{attempts} attempts in {minutes} minutes");
}

proptest! {
    #[test]
    fn writes_are_bounded_for_any_input(
        said in proptest::collection::vec(("[a-z]{0,3}", "\\PC{0,40}", "\\PC{0,300}", 0usize..10), 0..12)
    ) {
        let containers: Vec<Container> = said.iter().map(|(pod, reason, text, state)| {
            let state = State::ALL.get(*state).copied().unwrap_or(State::Active);
            let mut container = container(pod, text, state);
            container.reason.clone_from(reason);
            container.reason_text.clone_from(text);
            container
        }).collect();
        let due = PodStatusWriter::default().due(&list(&containers), NOW + SETTLED_MS);
        prop_assert!(due.len() <= MAX_CONCURRENT_WRITES);
        for change in due {
            let ConditionChange::Show(name, standing) = change else { panic!("unexpected clear of a pod") };
            prop_assert!(!name.name.is_empty());
            prop_assert!(standing.message.chars().count() <= MESSAGE_CHARS);
            prop_assert!((1..=64).contains(&standing.reason.len()));
            prop_assert!(standing.reason.bytes().all(|b| b.is_ascii_alphanumeric()));
        }
    }
}
