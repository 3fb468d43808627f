//! Restores containers when connections to them arrive (`wake_on = "connection"`). A connection to
//! an offloaded container may mean that a CUDA call follows soon.
//!
//! ```text
//! offloaded ──connection count rises──> connection ──half were followed by a call, VRAM free──> prewake
//!                                       ├── call within 30 s: hit
//!                                       └── none: miss; counted also without a prewake
//! ```
//!
//! If most connections are not followed by calls, as with health probes, connections cause no more
//! prewakes after a few misses. Connections without a prewake are counted too, so prewakes resume
//! when calls follow again.

use affinode_proto::{event::EventKind, reason::Reason};

use super::{
    Key, Millis,
    container::Container,
    event::NodeEvent,
    node_state::NodeState,
    policy::{Mode, WakeOn},
    prewake,
};

/// Maximum time between a connection and the CUDA call that counts as its result.
const FOLLOWS_MS: Millis = 30_000;
/// Number of connections of a container that cause a prewake (a restore before an expected CUDA
/// call) in any case. After that, connections cause prewakes only if CUDA calls followed at least
/// half of the counted connections.
const MAX_UNPROVEN_CONNECTIONS: u32 = 4;
/// Number of counted connections at which the counts are halved, so that old outcomes lose weight.
/// Both counts are halved: all connections, and the connections that were followed by a call.
const FADE_AT: u32 = 32;

/// Statistics of the connections that arrived while a container was offloaded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Connections {
    /// Number of connections accepted on the container's network, as last read while the container
    /// was offloaded. `None`: not read since the offload.
    pub(super) accepted: Option<u64>,
    /// When the last counted connection arrived. `None`: none was counted yet, or a CUDA call has
    /// followed it.
    last: Option<Millis>,
    /// Number of counted connections.
    seen: u32,
    /// Number of counted connections that were followed by a call.
    followed: u32,
}

impl Connections {
    /// Discards the last reading after an offload, so that the next reading becomes the reference.
    /// The counts of earlier connections are kept.
    pub fn restart(&mut self) {
        self.accepted = None;
    }

    /// Records a reading of the number of accepted connections. Returns whether new connections
    /// have arrived that may cause a prewake. The first reading after an offload always returns
    /// false, because it is the reference for later readings.
    fn arrived(&mut self, now: Millis, accepted: u64) -> bool {
        let came = self.accepted.replace(accepted).is_some_and(|before| accepted > before);
        let worth_it = self.are_worth_it();
        came && self.knock(now) && worth_it
    }

    /// Counts a connection. Returns false, and does not count it, if the last counted connection
    /// arrived less than 30 s ago.
    fn knock(&mut self, now: Millis) -> bool {
        if self.last.is_some_and(|last| now.saturating_sub(last) < FOLLOWS_MS) {
            return false;
        }
        self.last = Some(now);
        if self.seen >= FADE_AT {
            (self.seen, self.followed) = (self.seen / 2, self.followed / 2);
        }
        self.seen += 1;
        true
    }

    /// Records a CUDA call. If the last counted connection arrived less than 30 s ago, the call
    /// counts as its result.
    pub fn used(&mut self, now: Millis) {
        if self.last.take().is_some_and(|last| now.saturating_sub(last) < FOLLOWS_MS) {
            self.followed += 1;
        }
    }

    /// Whether connections may cause prewakes (restores before an expected CUDA call): few were
    /// counted so far, or at least half of them were followed by a call.
    fn are_worth_it(&self) -> bool {
        self.seen < MAX_UNPROVEN_CONNECTIONS || self.followed * 2 >= self.seen
    }
}

/// Containers whose connections are counted, each with the pid of a process in its network
/// namespace.
pub(super) fn listening(node: &NodeState) -> impl Iterator<Item = (&Key, u32)> {
    let pid = |key: &Key| node.registry.processes.of(key).map(|(_, p)| p.identity.pid).next();
    let listening = node.registry.containers.iter().filter(|(_, c)| is_listening(c));
    listening.filter_map(move |(key, _)| Some((key, pid(key)?)))
}

pub(super) fn connections(node: &mut NodeState, key: &Key, count: Option<u64>) {
    let now = node.clock.now;
    let Some(container) = node.registry.containers.get_mut(key).filter(|c| is_listening(c)) else {
        return;
    };
    let Some(count) = count else { return has_no_network(node, key) };
    if !container.connections.arrived(now, count) {
        return;
    }
    let offloaded = node.registry.processes.of(key).all(|(_, p)| p.agent.phase.is_offloaded());
    if offloaded && prewake::has_room_to_spare(node, key) {
        prewake::prewake(node, key, Reason::Connection, now + FOLLOWS_MS);
        node.resume(key);
    }
}

fn has_no_network(node: &mut NodeState, key: &Key) {
    const WHY: &str = "wake_on=connection is ignored: the container uses the node's network, \
                       so a connection cannot be assigned to one container";
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    if container.warnings.iter().all(|known| known != WHY) {
        container.warnings.push(WHY.to_owned());
        node.publish(key, NodeEvent::new(EventKind::Annotation, WHY));
    }
}

/// Whether connections to the container are counted. They are counted if it is offloaded and its
/// policy has `wake_on = "connection"`. They are not counted after an offload that an operator
/// requested, because only a CUDA call or a request restores such a container.
fn is_listening(c: &Container) -> bool {
    c.policy.wake_on == WakeOn::Connection
        && c.rests_offloaded()
        && c.cause != Reason::Requested
        && c.policy.mode != Mode::Off
}
