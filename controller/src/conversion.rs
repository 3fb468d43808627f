//! Converts between the types of the core (the module that decides about moves) and those of the
//! control API.

mod list;
mod policies;

use affinode_core::{ActionResult, Change, ContainerSpec, Key, event::NodeEvent, texts::text_of};
use affinode_proto::{
    api::control::{ActionResponse, Announcement, Event},
    event::EventKind,
};

pub use self::{list::list, policies::policies};

/// Creates the control API's event for a container's change of state.
#[must_use]
pub fn event_of_change(change: Change) -> Event {
    Event {
        kind: EventKind::State.to_string(),
        key: change.key.to_string(),
        container: change.container,
        from: change.from.to_string(),
        to: change.to.to_string(),
        reason: change.reason.to_string(),
        text: text_of(change.reason, &change.detail),
        bytes: change.bytes,
        elapsed_ms: change.elapsed_ms,
        ..Event::default()
    }
}

/// Converts an event of the core to the control API's form.
#[must_use]
pub fn event_of(event: NodeEvent) -> Event {
    Event {
        kind: event.kind.to_string(),
        key: event.key.map(|key| key.to_string()).unwrap_or_default(),
        container: event.container,
        reason: event.reason.map(|reason| reason.to_string()).unwrap_or_default(),
        text: event.text,
        bytes: event.bytes,
        ..Event::default()
    }
}

/// Converts the result of an operator's request to a response of the control API.
#[must_use]
pub fn response_of(result: ActionResult) -> ActionResponse {
    ActionResponse {
        done: result.done,
        state: result.state.map(|state| state.to_string()).unwrap_or_default(),
        reason: result.reason.map(|reason| reason.to_string()).unwrap_or_default(),
        reason_text: result.text,
        bytes: result.bytes,
        elapsed_ms: result.elapsed_ms,
        ..ActionResponse::default()
    }
}

/// Converts a shim's announcement of a container to the core's description of the container.
#[must_use]
pub fn spec_of(announcement: Announcement) -> ContainerSpec {
    ContainerSpec {
        namespace: announcement.namespace,
        id: announcement.id,
        sandbox_id: announcement.sandbox_id,
        pod_namespace: announcement.pod_namespace,
        pod: announcement.pod,
        pod_uid: announcement.pod_uid,
        container: announcement.container,
        image: announcement.image,
        annotations: announcement.annotations.into_iter().collect(),
        cgroups_path: announcement.cgroups_path,
        bundle: announcement.bundle,
        generation: announcement.generation,
        init: (announcement.init_pid != 0)
            .then_some((announcement.init_pid, announcement.init_start_ticks)),
        job_user: None,
    }
}

/// Converts the core's description of a container to an announcement, the form in which the control
/// API lists containers.
#[must_use]
pub fn announcement_of(key: &Key, spec: &ContainerSpec) -> Announcement {
    Announcement {
        key: key.to_string(),
        namespace: spec.namespace.clone(),
        id: spec.id.clone(),
        sandbox_id: spec.sandbox_id.clone(),
        pod_namespace: spec.pod_namespace.clone(),
        pod: spec.pod.clone(),
        pod_uid: spec.pod_uid.clone(),
        container: spec.container.clone(),
        image: spec.image.clone(),
        annotations: spec.annotations.clone().into_iter().collect(),
        cgroups_path: spec.cgroups_path.clone(),
        bundle: spec.bundle.clone(),
        generation: spec.generation,
        init_pid: spec.init.map_or(0, |(pid, _)| pid),
        init_start_ticks: spec.init.map_or(0, |(_, start_ticks)| start_ticks),
        ..Announcement::default()
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::{reason::Reason, state::State};

    use super::*;

    #[test]
    fn announcement_survives_conversion() {
        let announcement = Announcement {
            key: "0".repeat(32),
            namespace: "a".into(),
            id: "b".into(),
            sandbox_id: "c".into(),
            pod_namespace: "d".into(),
            pod: "e".into(),
            pod_uid: "f".into(),
            container: "g".into(),
            image: "h".into(),
            annotations: [("affinode.io/mode".to_owned(), "off".to_owned())].into(),
            cgroups_path: "i".into(),
            bundle: "j".into(),
            generation: 7,
            init_pid: 8,
            init_start_ticks: 9,
            ..Announcement::default()
        };
        let key = Key::parse(&announcement.key).unwrap();
        let spec = spec_of(announcement.clone());
        assert_eq!(announcement_of(&key, &spec), announcement);
    }

    #[test]
    fn event_keeps_its_words() {
        let event = NodeEvent::new(EventKind::Refused, "why").because(Reason::Busy).of_bytes(5);
        let sent = event_of(event);
        assert_eq!((sent.kind.as_str(), sent.reason.as_str()), ("refused", "busy"));
        assert_eq!((sent.text.as_str(), sent.bytes, sent.key.as_str()), ("why", 5, ""));
        let result = ActionResult { state: Some(State::Idle), ..ActionResult::default() };
        assert_eq!(response_of(result).state, "Idle");
    }
}
