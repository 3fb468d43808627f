//! Restores containers before an expected CUDA call (prewake), and determines when the next
//! decision about a container is due.

use affinode_proto::{reason::Reason, state::State};

use super::{
    Key, Millis, container::Prewake, ledger::margin_bytes, needs, node_state::NodeState,
    oversubscription, policy::Mode,
};

/// Time before the expected CUDA call at which the restore of a prewake begins.
const LEAD_MS: Millis = 5_000;
/// Assumed speed of a restore from disk, in bytes per millisecond. An H200 machine with a virtual
/// disk restored at 1.2 GB/s (driver 580.159). Other disks are slower.
const DISK_BYTES_PER_MS: u64 = 500_000;

/// Prewakes a container (restores it in advance) if its next CUDA call is expected soon and the
/// restore needs no eviction.
pub(super) fn expect(node: &mut NodeState, key: &Key) {
    let Some(at) = prewake_at(node, key) else { return };
    let until = prewake_until(node, key);
    if node.clock.now < at || node.clock.now >= until || !has_room_to_spare(node, key) {
        return;
    }
    if let Some(container) = node.registry.containers.get_mut(key) {
        container.usage.history.prewoken();
    }
    prewake(node, key, Reason::Expected, until);
}

/// Whether a container can be restored without an eviction and without delaying a waiter.
pub(super) fn has_room_to_spare(node: &NodeState, key: &Key) -> bool {
    let needs = needs::container_needs(node, key);
    node.admission.queue.is_empty()
        && node.gpus.error.is_none()
        && needs::fits(node, key, &needs, margin_bytes)
}

/// Restores a container before an expected call, and keeps it resident until `until` if no call
/// comes.
pub(super) fn prewake(node: &mut NodeState, key: &Key, why: Reason, until: Millis) {
    let Some(container) = node.registry.containers.get_mut(key) else { return };
    container.goal.become_resident();
    container.cause = why;
    container.prewake = Some(Prewake { until, why });
    node.prediction.prewakes += 1;
}

/// Time at which an offloaded container is to be restored for an expected call. `None`: no such
/// restore is planned.
#[must_use]
pub(super) fn prewake_at(node: &NodeState, key: &Key) -> Option<Millis> {
    let c = node.registry.containers.get(key)?;
    let out = c.rests_offloaded() && c.policy.prewake;
    let wanted = c.cause != Reason::Requested && c.policy.mode != Mode::Off;
    let offloaded = node.registry.processes.of(key).all(|(_, p)| p.agent.phase.is_offloaded());
    let lead_ms = LEAD_MS + disk_ms(node, key);
    let history = &c.usage.history;
    // If the pauses are too short for the longer lead, the restore begins late.
    let plan = history.prewake(lead_ms).or_else(|| history.prewake(LEAD_MS));
    let (begin, _) = plan.filter(|_| out && wanted && offloaded)?;
    // A missed prewake shows that the history does not predict the present use, so the
    // container stays offloaded until it is called.
    let worth = !c.usage.prewake_missed && node.clock.now < prewake_until(node, key);
    worth.then(|| c.usage.last_use.saturating_add(begin))
}

/// Expected time in which the container's content is read from disk, in milliseconds.
fn disk_ms(node: &NodeState, key: &Key) -> Millis {
    let on_disk = node.registry.processes.of(key).map(|(_, process)| process.disk_bytes());
    on_disk.fold(0, u64::saturating_add) / DISK_BYTES_PER_MS
}

fn prewake_until(node: &NodeState, key: &Key) -> Millis {
    node.registry
        .containers
        .get(key)
        .and_then(|c| Some(c.usage.last_use + c.usage.history.prewake(LEAD_MS)?.1))
        .unwrap_or(0)
}

/// Next time at which a decision about the container is due, as far as it is known now. `None`:
/// no decision is planned.
#[must_use]
pub(super) fn due_at(node: &NodeState, key: &Key) -> Option<Millis> {
    let c = node.registry.containers.get(key)?;
    match c.shown.state {
        State::Active | State::Idle if c.goal.is_resident() => {
            if !oversubscription::leaves_when_idle(node, key) {
                return None;
            }
            let rested = c.figures.restored_at.map_or(0, |t| t + c.policy.minimum_residency_ms);
            let expected =
                c.prewake.map(|prewake| prewake.until).or(c.usage.busy_until()).unwrap_or(0);
            let earliest = c.resident_until.max(c.offload_failures.not_before());
            Some(c.idle_at().max(rested).max(expected).max(earliest))
        }
        State::Offloaded => prewake_at(node, key),
        _ => None,
    }
}
