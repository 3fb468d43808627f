//! Watches the node's controller, and publishes its events on the pods and its figures on the node
//! object.

use std::{collections::HashMap, path::PathBuf, time::Duration};

use affinode_proto::{
    api::{
        control::{Container, Event, EventsRequest, ListRequest, ListResponse},
        control_ttrpc::ControlClient,
    },
    event::EventKind,
    state::State,
};
use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{
    Client,
    runtime::events::{Event as PodEvent, EventType, Recorder, Reporter},
};
use tokio::{sync::watch, time::Instant};
use ttrpc::context::with_duration;

use super::{
    full_gpus::FullGpus,
    gpu_conditions::GpuConditions,
    gpu_load::GpuLoads,
    idle_label::IdleLabel,
    node_labels::{NodeLabels, RECLAIMABLE, RECLAIMED},
    pod_events::{EventRateLimiter, pod_event},
    pods::Pods,
};
use crate::error_chain;

/// Time limit for a reply from the controller.
const ANSWER: Duration = Duration::from_secs(10);
/// Maximum time for which one request waits for events.
const WAIT: Duration = Duration::from_secs(5);
/// Pause after a request to which the controller did not reply.
const REST: Duration = Duration::from_secs(5);
/// Minimum time between two requests for events.
const PACE: Duration = Duration::from_millis(250);
/// Minimum time between two writes of the node's annotations.
const ANNOTATE_EVERY: Duration = Duration::from_secs(30);
/// Number of attempts without a reply from a controller after which the node is considered to have
/// none.
const MAX_SILENT_ATTEMPTS: u32 = 3;
/// Time after the start of the agent in which a controller must report GPUs before the node is
/// considered to have none that are full.
const FIRST_READING_TIMEOUT: Duration = Duration::from_secs(20);
/// Minimum time that a CUDA call must wait for VRAM before the wait is published, in milliseconds.
const MIN_REPORTED_WAIT_MS: i64 = 5_000;

/// Watches a node's controller, and shows the states of its containers on the pods of the node.
pub struct ControllerWatch {
    socket: PathBuf,
    recorder: Recorder,
    mark: NodeLabels,
    idle: IdleLabel,
    /// Writes the conditions of pods. `None`: pods get only events.
    pods_client: Option<Pods>,
    allowance: EventRateLimiter,
    /// The pod of each container. The key is the controller's key of the container.
    pods: HashMap<String, ObjectReference>,
    /// The event of each container that waits for VRAM, by the controller's key of the container.
    /// The event is published only if the wait is long.
    waiting: HashMap<String, Event>,
    /// Time of the latest event that was handled, in milliseconds since 1970. Events up to this
    /// time are not handled again when a controller sends them again.
    last_unix_ms: i64,
    annotated: Option<(Instant, [u64; 2])>,
    /// Which GPUs are full of unmovable VRAM, and how much each GPU is used. Both are sent to
    /// `conditions`.
    full_gpus: FullGpus,
    loads: GpuLoads,
    conditions: watch::Sender<Option<GpuConditions>>,
    started: Instant,
    /// Number of attempts in a row to which no controller replied.
    silent_attempts: u32,
}

impl ControllerWatch {
    /// Creates a watch of the controller that listens at this socket.
    #[must_use]
    pub fn new(
        socket: PathBuf,
        client: Client,
        mark: NodeLabels,
        idle: IdleLabel,
        instance: String,
        pod_state: bool,
    ) -> ControllerWatch {
        let reporter = Reporter { controller: "affinode.io/node".into(), instance: Some(instance) };
        ControllerWatch {
            socket,
            recorder: Recorder::new(client.clone(), reporter),
            mark,
            idle,
            pods_client: pod_state.then(|| Pods::new(client)),
            allowance: EventRateLimiter::default(),
            pods: HashMap::new(),
            waiting: HashMap::new(),
            last_unix_ms: Timestamp::now().as_millisecond(),
            annotated: None,
            full_gpus: FullGpus::default(),
            loads: GpuLoads::default(),
            conditions: watch::Sender::default(),
            started: Instant::now(),
            silent_attempts: 0,
        }
    }

    /// Returns a channel with the conditions of the GPUs. `None`: they are unknown, because the agent
    /// has just started.
    #[must_use]
    pub fn gpu_conditions(&self) -> watch::Receiver<Option<GpuConditions>> {
        self.conditions.subscribe()
    }

    /// Watches the controller until the async runtime ends. A missing controller is not an error,
    /// because a node without GPU containers has none.
    pub async fn run(mut self) {
        loop {
            if let Err(error) = self.follow().await {
                tracing::debug!("no reply from the controller: {}", error_chain::chain(&error));
            }
            self.silent_attempts = self.silent_attempts.saturating_add(1);
            // A controller ends with the last GPU container of its node.
            if self.silent_attempts >= MAX_SILENT_ATTEMPTS {
                self.judge_gpus(&ListResponse::default());
                self.idle.update(None).await;
            }
            tokio::time::sleep(REST).await;
        }
    }

    async fn follow(&mut self) -> Result<(), ttrpc::Error> {
        let address = format!("unix://{}", self.socket.display());
        let control = ControlClient::new(ttrpc::r#async::Client::connect(&address).await?);
        // Event numbers start again at 1 with each controller, but event times only increase.
        let mut after = 0;
        loop {
            let request = EventsRequest {
                after,
                timeout_ms: u32::try_from(WAIT.as_millis()).unwrap_or(u32::MAX),
                ..EventsRequest::default()
            };
            let answer = control.events(with_duration(WAIT + ANSWER), &request).await?;
            let list = control.list(with_duration(ANSWER), &ListRequest::default()).await?;
            self.silent_attempts = 0;
            if self.has_gpus(&list) {
                self.judge_gpus(&list);
            }
            self.idle.update(Some(&list)).await;
            self.know(&list);
            for event in answer.events {
                after = event.sequence;
                if event.unix_ms > self.last_unix_ms {
                    self.last_unix_ms = event.unix_ms;
                    self.consider(event).await;
                }
            }
            self.tell_who_waits(&list).await;
            if let Some(pods) = &mut self.pods_client {
                pods.show(&list).await;
            }
            tokio::time::sleep(PACE).await;
            self.annotate(&list).await;
        }
    }

    /// Returns whether the conditions of the GPUs can be determined from a reading. The first reading
    /// must contain GPUs, unless there is none for [`FIRST_READING_TIMEOUT`], because a controller that
    /// has just started has not read the GPUs yet.
    fn has_gpus(&self, reading: &ListResponse) -> bool {
        reading.gpus.iter().any(|gpu| gpu.vram_total_bytes > 0)
            || self.conditions.borrow().is_some()
            || self.started.elapsed() >= FIRST_READING_TIMEOUT
    }

    /// Determines the conditions of the GPUs from a reading, and sends a change.
    fn judge_gpus(&mut self, reading: &ListResponse) {
        let now = self.started.elapsed();
        let full = self.full_gpus.update(now, &reading.gpus, !reading.gpu_error.is_empty());
        let judged = GpuConditions { full, loads: self.loads.update(now, reading) };
        self.conditions.send_if_modified(|known| {
            let known_full = known.as_ref().map(|known| &known.full);
            for uuid in &judged.full {
                if known_full.is_none_or(|known| !known.contains(uuid)) {
                    tracing::warn!("GPU {uuid}: full of VRAM that no offload can free");
                }
            }
            let judged = Some(judged);
            let changed = *known != judged;
            *known = judged;
            changed
        });
    }

    /// Records the pods of the listed containers. The pod of a container that is no longer listed
    /// is kept while an event of the container waits to be published.
    fn know(&mut self, list: &ListResponse) {
        let here = |key: &String| list.containers.iter().any(|c| c.announcement.key == *key);
        let waiting = &self.waiting;
        self.pods.retain(|key, _| here(key) || waiting.contains_key(key));
        for container in &list.containers {
            let Some(a) = container.announcement.as_ref().filter(|a| !a.pod_uid.is_empty()) else {
                continue;
            };
            self.pods.entry(a.key.clone()).or_insert_with(|| ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(a.pod_namespace.clone()),
                name: Some(a.pod.clone()),
                uid: Some(a.pod_uid.clone()),
                field_path: Some(format!("spec.containers{{{}}}", a.container)),
                ..ObjectReference::default()
            });
        }
    }

    async fn consider(&mut self, event: Event) {
        if event.kind == EventKind::State.as_str() {
            self.waiting.remove(&event.key);
            if event.to == State::Queued.as_str() {
                self.waiting.insert(event.key.clone(), event);
                return;
            }
        }
        self.tell(&event).await;
    }

    async fn tell_who_waits(&mut self, list: &ListResponse) {
        let long_ago = Timestamp::now().as_millisecond() - MIN_REPORTED_WAIT_MS;
        let late = self.waiting.extract_if(|_, event| event.unix_ms < long_ago);
        for (key, mut event) in late.collect::<Vec<_>>() {
            let waits =
                |c: &&Container| c.announcement.key == key && c.state == State::Queued.as_str();
            // The controller has determined by now why the call waits.
            if let Some(container) = list.containers.iter().find(waits) {
                event.text.clone_from(&container.reason_text);
                self.tell(&event).await;
            }
        }
    }

    async fn tell(&mut self, event: &Event) {
        let (Some(note), Some(pod)) = (pod_event(event), self.pods.get(&event.key)) else { return };
        let uid = pod.uid.as_deref().unwrap_or_default();
        if !self.allowance.take(uid, event.unix_ms) {
            return;
        }
        let event = PodEvent {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason.into(),
            note: Some(note.note),
            action: note.action.into(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, pod).await {
            tracing::warn!(
                "pod event: the event cannot be published: {}",
                error_chain::chain(&error)
            );
        }
    }

    async fn annotate(&mut self, list: &ListResponse) {
        let values =
            [reclaimable_bytes(list), list.gpus.iter().map(|g| g.vram_reclaimed_bytes).sum()];
        let due = self
            .annotated
            .is_none_or(|(at, last)| last != values && at.elapsed() >= ANNOTATE_EVERY);
        if !due {
            return;
        }
        let [reclaimable, reclaimed] = values.map(|bytes| Some(bytes.to_string()));
        let set = [(RECLAIMABLE, reclaimable), (RECLAIMED, reclaimed)];
        match self.mark.annotate(&set).await {
            Ok(()) => self.annotated = Some((Instant::now(), values)),
            Err(error) => {
                tracing::warn!(
                    "node object: cannot write annotations: {}",
                    error_chain::chain(&error)
                )
            }
        }
    }
}

/// Computes the VRAM of idle containers that are neither pinned nor in the mode `off`, in bytes.
fn reclaimable_bytes(list: &ListResponse) -> u64 {
    let idle = |c: &&Container| c.state == State::Idle.as_str() && !c.pinned && c.mode != "off";
    list.containers.iter().filter(idle).map(|c| c.vram_bytes).sum()
}
