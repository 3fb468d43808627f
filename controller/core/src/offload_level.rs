//! Chooses the level of an offload for each process: whether the CUDA context stays on the GPU
//! (first level) or leaves it too (second level).
//!
//! ```text
//!              idle                         a waiter needs the VRAM of contexts
//! resident ──────────> context kept ────────────────────────────────────────> context gone
//!            copy out                       the driver's checkpoint
//! ```
//!
//! | engine | container is idle | a waiter needs the VRAM of contexts too |
//! | --- | --- | --- |
//! | `auto` | context kept | context gone |
//! | `copy` | context kept | - |
//! | `full` | context gone | - |
//! | `checkpoint` | context gone, by the driver alone | - |
//!
//! With every engine, the context of a process stays if a checkpoint of it would be unsafe
//! ([`Process::keeps_context`]). The first level and its restore never use the driver's checkpoint.
//! The library uses the driver's lock only if it has no other way to wait for the GPU's work. The
//! driver refuses this lock to clients of MPS, which then stay resident.

use affinode_proto::wire::{Phase, ProcessFlags};

use super::{
    Key, Millis,
    node_state::NodeState,
    plan::{OffloadMethod, OrderDeadlines},
    policy::Engine,
    process::Process,
};

/// Deadlines of the close and lock orders in a forced offload. They are longer than usual, because
/// a process is ended if its forced offloads fail. They do not delay the grant of another
/// container, which waits at most 0.9 s for this process to pause its allocations.
const FORCED: OrderDeadlines = OrderDeadlines { close_ms: 2_000, lock_ms: 10_000 };

/// Returns a function that chooses the offload method for a process of this container.
pub(super) fn moves(node: &NodeState, key: &Key) -> impl Fn(&Process) -> OffloadMethod + use<> {
    let offload = node.registry.containers.get(key).and_then(|c| c.goal.offload());
    let keeps_context = offload.is_some_and(|offload| offload.keeps_context);
    let engine = match engine_of(node, key) {
        Engine::Full if keeps_context => Engine::Auto,
        engine => engine,
    };
    let deep = offload.is_some_and(|offload| offload.evict_context) && !keeps_context;
    move |process| {
        let method = method_of(process, engine);
        let goes = deep && engine == Engine::Auto && !process.keeps_context();
        match method {
            OffloadMethod::Copy if goes && has_copyable_memory(process) => {
                OffloadMethod::CopyAndCheckpoint
            }
            OffloadMethod::Copy if goes => OffloadMethod::DriverCheckpoint,
            method => method,
        }
    }
}

/// Returns the engine (the method of moving GPU memory) that applies to a container. If the
/// container may be restored on another GPU, `auto` acts as `full`, because a kept context could
/// not move to the other GPU.
pub(super) fn engine_of(node: &NodeState, key: &Key) -> Engine {
    let Some(container) = node.registry.containers.get(key) else { return Engine::Checkpoint };
    match container.policy.engine {
        Engine::Auto if container.policy.allow_gpu_migration && node.gpus.samples.len() > 1 => {
            Engine::Full
        }
        engine => engine,
    }
}

/// Whether the CUDA contexts of the container's processes may be checkpointed too if another
/// container needs their VRAM.
pub(super) fn has_second_level(node: &NodeState, key: &Key) -> bool {
    engine_of(node, key) != Engine::Copy
}

/// Whether an offload that only copies memory would free nothing, because no process has memory
/// that the library can copy.
pub(super) fn has_nothing_to_copy(node: &NodeState, key: &Key) -> bool {
    let moves = moves(node, key);
    let is_void = |p: &Process| moves(p) == OffloadMethod::Copy && !has_copyable_memory(p);
    node.registry.processes.of(key).all(|(_, p)| is_void(p))
}

/// Changes a requested offload that lacks host memory: the CUDA contexts stay on the GPU, so that
/// less host memory is needed. False: the offload needs as much without the contexts, or would free
/// nothing.
pub(super) fn keep_context(node: &mut NodeState, key: &Key) -> bool {
    let needed = |node: &NodeState| -> u64 {
        let moves = moves(node, key);
        node.registry.processes.of(key).map(|(_, p)| p.host_need_bytes(moves(p))).sum()
    };
    let set = |node: &mut NodeState, keeps: bool| {
        let container = node.registry.containers.get_mut(key).filter(|c| c.goal.is_requested());
        let offload = container.and_then(|c| c.goal.offload_mut());
        offload.map(|offload| std::mem::replace(&mut offload.keeps_context, keeps))
    };
    // The contexts of a copied-out container are to be evicted, or keeping them would end that.
    if node.registry.processes.of(key).any(|(_, p)| p.agent.phase.is_offloaded()) {
        return false;
    }
    let before_bytes = needed(node);
    if set(node, true) != Some(false) {
        return false;
    }
    let copied_bytes = needed(node);
    // A copy to pages that the processes kept needs no memory, and frees VRAM nevertheless.
    let is_less = copied_bytes < before_bytes && !has_nothing_to_copy(node, key);
    if !is_less {
        set(node, false);
    }
    is_less
}

/// Time by which an eviction is expected to lengthen the container's next restore, in milliseconds.
/// `deep`: its CUDA contexts are checkpointed too. If the container is copied out already, only the
/// contexts count.
pub(super) fn expected_delay_ms(node: &NodeState, key: &Key, deep: bool) -> Millis {
    let moves = moves(node, key);
    let deep = deep && has_second_level(node, key);
    let of_one = |p: &Process| {
        let method = match moves(p) {
            OffloadMethod::Copy if deep && !p.keeps_context() => OffloadMethod::CopyAndCheckpoint,
            method => method,
        };
        match p.agent.phase {
            Phase::CopiedOut => context_delay_ms(p.memory.swap.copied_out_bytes),
            _ => restore_ms(
                method,
                p.vram_bytes(),
                p.memory.swap.swappable_bytes.min(p.vram_bytes()),
            ),
        }
    };
    node.registry.processes.of(key).map(|(_, p)| of_one(p)).sum()
}

/// Returns the deadlines of a container's offload: for calls in progress to end, and for running
/// kernels to end.
pub(super) fn deadlines(node: &NodeState, key: &Key) -> OrderDeadlines {
    let usual = node.settings.deadlines;
    match node.registry.containers.get(key).is_some_and(|c| c.goal.is_forced()) {
        true => OrderDeadlines {
            close_ms: usual.close_ms.max(FORCED.close_ms),
            lock_ms: usual.lock_ms.max(FORCED.lock_ms),
        },
        false => usual,
    }
}

/// Whether a process holds memory that the library can copy.
fn has_copyable_memory(process: &Process) -> bool {
    process.memory.swap.swappable_bytes > 0
}

/// Returns the offload method of a process with this engine, if no other container needs the VRAM
/// of its context.
pub(super) fn method_of(process: &Process, engine: Engine) -> OffloadMethod {
    // Memory that was imported from a copier must be copied out, because a checkpoint that includes
    // it could not be restored.
    let by_driver = match may_be_imported(process) {
        true => OffloadMethod::CopyAndCheckpoint,
        false => OffloadMethod::DriverCheckpoint,
    };
    match engine {
        Engine::Copy => OffloadMethod::Copy,
        // A process whose context must stay on the GPU is only copied. Memory that cannot be copied
        // stays with the context.
        Engine::Auto | Engine::Full if process.keeps_context() && !process.failed_moves.copy => {
            OffloadMethod::Copy
        }
        Engine::Auto if process.failed_moves.copy => by_driver,
        Engine::Auto => OffloadMethod::Copy,
        Engine::Full if has_copyable_memory(process) && !process.failed_moves.copy => {
            OffloadMethod::CopyAndCheckpoint
        }
        Engine::Full | Engine::Checkpoint if !has_copyable_memory(process) => {
            OffloadMethod::DriverCheckpoint
        }
        Engine::Full | Engine::Checkpoint => by_driver,
    }
}

/// Whether a process may have memory imported from a copier. Its counters show this. Before the
/// first reading of the counters, a process that is not offloaded is assumed to have such memory.
fn may_be_imported(process: &Process) -> bool {
    match &process.activity.counters {
        Some(page) => page.notes.intersects(ProcessFlags::IMPORTED),
        None => !process.agent.phase.is_offloaded(),
    }
}

/// Expected duration of a process's restore, in milliseconds. Measured on an H200 (driver 580.159):
/// copies run at 52 GB/s, the driver restores at 5.8 GB/s, and each takes a fixed time in addition.
/// A copier copies while the driver restores the context.
fn restore_ms(method: OffloadMethod, vram_bytes: u64, copied_bytes: u64) -> Millis {
    const COPY_FIXED_MS: u64 = 4;
    const COPY_BYTES_PER_MS: u64 = 52_000_000;
    const DRIVER_FIXED_MS: u64 = 200;
    const DRIVER_BYTES_PER_MS: u64 = 5_800_000;
    let copy_ms = COPY_FIXED_MS + copied_bytes / COPY_BYTES_PER_MS;
    match method {
        OffloadMethod::Copy => copy_ms,
        OffloadMethod::CopyAndCheckpoint => DRIVER_FIXED_MS.max(copy_ms),
        OffloadMethod::DriverCheckpoint => DRIVER_FIXED_MS + vram_bytes / DRIVER_BYTES_PER_MS,
    }
}

/// Time by which a checkpoint of the CUDA context is expected to lengthen a restore, in
/// milliseconds. It is 0 if the copier's copy takes longer than the driver's restore of the
/// context.
fn context_delay_ms(copied_bytes: u64) -> Millis {
    let of = |method| restore_ms(method, 0, copied_bytes);
    of(OffloadMethod::CopyAndCheckpoint) - of(OffloadMethod::Copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_behind_a_large_copy_costs_nothing() {
        assert_eq!(context_delay_ms(60 << 30), 0);
        assert!(context_delay_ms(1 << 30) > 150);
    }

    /// Compares the estimates with measured restores (medians, H200, driver 580.159). An estimate
    /// may differ from the measured value by at most a third.
    #[test]
    fn expected_restores_are_near_measured_ones() {
        let gib = |gib: f64| (gib * f64::from(1 << 30)) as u64;
        for (method, size, measured_ms) in [
            (OffloadMethod::Copy, 1.0, 22),
            (OffloadMethod::Copy, 24.2, 470),
            (OffloadMethod::Copy, 60.0, 1_180),
            (OffloadMethod::CopyAndCheckpoint, 1.0, 197),
            (OffloadMethod::CopyAndCheckpoint, 32.0, 636),
            (OffloadMethod::DriverCheckpoint, 10.0, 2_200),
            (OffloadMethod::DriverCheckpoint, 40.0, 7_450),
        ] {
            let expected = restore_ms(method, gib(size), gib(size));
            let off = expected.abs_diff(measured_ms);
            assert!(off <= measured_ms / 3, "{method:?} of {size} GiB: {expected}, {measured_ms}");
        }
    }
}
