//! Executes the node's effects. An order takes the time that the calibration states. A reading of a
//! GPU takes no time.

use affinode_core::{
    Effect, GpuSample, Input, Millis, Survey, copy_watch::TurnBackCause,
    driver_limit::DriverLimitOutcome,
};
use affinode_proto::{
    event::EventKind,
    state::State,
    wire::{
        Phase,
        message::{Action, ControllerMessage, Outcome},
    },
};

use super::{
    PolicyDecision, STEP_MS, SimulatedNode, SimulationEvent, content,
    names::{id, number, pid},
    process,
};
use crate::{SimulationError, memory::OffloadLevel, summary::CallDelay};

/// Time from the call that cancels a copy out to the end of the copy. The controller reads the
/// counters every 20 ms.
const CANCEL_MS: Millis = 20;
/// Maximum time between an offload and the following restore for which the restore counts as
/// thrash.
const THRASH_MS: Millis = 60_000;

/// Returns the sample of a GPU as NVML would give it. In its list of processes, the sample contains
/// only `process`. If `process` is `None`, the list is empty.
pub(super) fn gpu_sample(
    world: &SimulatedNode<'_>,
    gpu: usize,
    process: Option<usize>,
) -> GpuSample {
    let held = |n: &usize| (pid(*n), world.processes[*n].memory.held_bytes());
    let is_seen = |(_, bytes): &(u32, u64)| *bytes > 0;
    GpuSample {
        uuid: world.uuids[gpu].clone(),
        total_bytes: world.machine.vram_bytes,
        used_bytes: world.used_bytes[gpu],
        processes: process.iter().map(held).filter(is_seen).collect(),
        ..GpuSample::default()
    }
}

/// Returns a reading of the GPU of process `n` as an input for the node, although the node has not
/// requested it.
pub(super) fn gpu_reading(world: &SimulatedNode<'_>, n: usize) -> Input {
    Input::Proven(
        world.processes[n].key.clone(),
        u64::MAX,
        Ok(vec![gpu_sample(world, world.processes[n].gpu, None)]),
    )
}

/// Executes one effect of the node.
pub(super) fn simulate_effect(
    world: &mut SimulatedNode<'_>,
    effect: Effect,
) -> Result<(), SimulationError> {
    match effect {
        Effect::Send(process, ControllerMessage::Order { order, action, .. }) => {
            return begin_order(world, process.0 as usize, order, action);
        }
        Effect::TurnBack(process, TurnBackCause::NotWanted) => {
            cancel_copy(world, process.0 as usize);
        }
        Effect::Survey { key: asked, processes, host_pool } => {
            let n = number(asked.as_str());
            let survey = Survey {
                gpus: Ok(vec![gpu_sample(world, world.processes[n].gpu, Some(n))]),
                host: Ok(world.host.survey(&processes, host_pool)),
            };
            world.inputs.push_back(Input::Surveyed(asked, survey));
        }
        Effect::Prove { key: asked, number: proof, .. } => {
            let n = number(asked.as_str());
            let gpus = Ok(vec![gpu_sample(world, world.processes[n].gpu, None)]);
            world.inputs.push_back(Input::Proven(asked, proof, gpus));
        }
        Effect::StoreOnDisk { process, bytes } => content::store(world, process.0 as usize, bytes),
        // The simulated driver enforces no limits.
        Effect::LimitInDriver(order) => {
            world.inputs.push_back(Input::DriverLimited(order.key, DriverLimitOutcome::TooOld));
        }
        Effect::Publish(event) => {
            world.figures.refused += u64::from(event.kind == EventKind::Refused);
        }
        Effect::Changed(change) => {
            if let Some(decisions) = &mut world.decisions {
                decisions.extend(PolicyDecision::of(world.now, &change));
            }
            if matches!(change.to, State::Offloaded | State::Active) {
                let n = number(change.key.as_str());
                if change.to == State::Offloaded {
                    content::plan_disk(world, n, world.processes[n].disk_after_ms);
                }
                let reading = gpu_reading(world, n);
                world.inputs.push_back(reading);
                world.plan_due(n, STEP_MS);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Begins the execution of an order to an agent, and plans its end.
fn begin_order(
    world: &mut SimulatedNode<'_>,
    n: usize,
    order: u64,
    action: Action,
) -> Result<(), SimulationError> {
    if world.processes[n].has_exited {
        return Ok(());
    }
    let mut takes_ms = world.processes[n].memory.order_ms(action, &world.costs);
    match action {
        // From now on calls wait at the gate.
        Action::Close { .. } if world.processes[n].busy_until.is_none() => {
            world.processes[n].phase = Phase::Closed;
        }
        Action::Restore => takes_ms += restore_begins(world, n)?,
        // These orders have no effect: simulated processes do not allocate, and stay on their
        // GPUs.
        Action::RestoreOnGpu { .. }
        | Action::HoldAllocations { .. }
        | Action::ReleaseAllocations => return Ok(()),
        _ => {}
    }
    let p = &mut world.processes[n];
    p.order = order;
    p.copy_ends = matches!(action, Action::CopyOut { .. }).then_some(world.now + takes_ms);
    world.at(world.now + takes_ms, SimulationEvent::Done(n as u32, action));
    Ok(())
}

/// Cancels the copy out of a process, whose memory then stays on the GPU.
fn cancel_copy(world: &mut SimulatedNode<'_>, n: usize) {
    let p = &mut world.processes[n];
    if let Some(end) = p.copy_ends.take() {
        p.cancelled_end = Some(end);
        world.at(world.now + CANCEL_MS, SimulationEvent::Cancelled(n as u32));
    }
}

/// Reports to the node that a process has cancelled its copy out.
pub(super) fn copy_is_cancelled(
    world: &mut SimulatedNode<'_>,
    n: usize,
) -> Result<(), SimulationError> {
    let p = &world.processes[n];
    if p.has_exited {
        return Ok(());
    }
    let report = p.memory.swap().report(p.order, Outcome::GivenUp, p.phase, 0);
    world.tell(Input::Message(id(n), report))
}

/// Allocates VRAM at the begin of a restore, because the driver allocates before it copies. Returns the
/// time that the disk needs, in milliseconds.
fn restore_begins(world: &mut SimulatedNode<'_>, n: usize) -> Result<Millis, SimulationError> {
    let (now, p) = (world.now, &mut world.processes[n]);
    let bytes = p.memory.gone_bytes();
    if world.used_bytes[p.gpu] + bytes > world.machine.vram_bytes {
        return Err(SimulationError::Overcommitted);
    }
    p.count_freed(now);
    p.restored_from = p.memory.level;
    p.phase_after_restore = p.memory.execute_order(Action::Restore);
    world.used_bytes[p.gpu] += bytes;
    world.resident_bytes += bytes;
    world.figures.restores += 1;
    if p.restored_from == OffloadLevel::Copied {
        world.figures.restores_copied += 1;
    }
    if p.went.is_some_and(|went| now - went < THRASH_MS) {
        world.figures.thrash += 1;
    }
    Ok(content::remove(world, n))
}

/// Frees VRAM at the end of a copy out or checkpoint.
fn vram_is_freed(world: &mut SimulatedNode<'_>, n: usize, action: Action) {
    let now = world.now;
    let p = &mut world.processes[n];
    p.count_freed(now);
    let (level, before) = (p.memory.level, p.memory.gone_bytes());
    p.phase = p.memory.execute_order(action);
    if level == OffloadLevel::Resident {
        p.went = Some(now);
    }
    let freed_bytes = p.memory.gone_bytes() - before;
    world.used_bytes[p.gpu] -= freed_bytes;
    world.resident_bytes -= freed_bytes;
    content::add(world, n, action, freed_bytes);
}

/// Ends an order, and reports its outcome to the node.
pub(super) fn end_order(
    world: &mut SimulatedNode<'_>,
    n: usize,
    action: Action,
) -> Result<(), SimulationError> {
    let p = &mut world.processes[n];
    if p.has_exited {
        return Ok(());
    }
    if matches!(action, Action::CopyOut { .. }) {
        let now = world.now;
        if p.cancelled_end.take_if(|end| *end == now).is_some() {
            return Ok(());
        }
        p.copy_ends = None;
    }
    let mut outcome = Outcome::Done;
    match action {
        Action::Close { .. } if p.phase == Phase::Open => outcome = Outcome::Busy,
        Action::Close { .. } | Action::Unlock => p.phase = Phase::Closed,
        Action::Lock { .. } => p.phase = Phase::Locked,
        Action::Restore => p.phase = p.phase_after_restore,
        Action::Open => p.phase = Phase::Open,
        Action::CopyOut { .. } | Action::Checkpoint { .. } => vram_is_freed(world, n, action),
        _ => {}
    }
    let p = &world.processes[n];
    let report = Input::Message(id(n), p.memory.swap().report(p.order, outcome, p.phase, 0));
    if action != Action::Open {
        return world.tell(report);
    }
    let page = calls_continue(world, n);
    world.tell(report)?;
    page.map_or(Ok(()), |page| world.tell(page))
}

/// Releases the waiting calls of a process after its gate has opened. If calls were waiting,
/// returns the new counters as an input.
fn calls_continue(world: &mut SimulatedNode<'_>, n: usize) -> Option<Input> {
    let now = u32::try_from(world.now).unwrap_or(u32::MAX);
    let p = &mut world.processes[n];
    let from = std::mem::take(&mut p.restored_from);
    if p.waiting.is_empty() {
        return None;
    }
    p.lived.delayed += p.waiting.len() as u64;
    let delays = p.waiting.iter().map(|since| now.saturating_sub(*since));
    world.delays.extend(delays.map(|ms| CallDelay { ms, from }));
    let page = process::use_begins(world, n);
    world.processes[n].waiting.clear();
    Some(page)
}
