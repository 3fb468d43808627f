//! The suite for a machine with a GPU: tests whose result only a real driver can show.
//!
//! | part | content |
//! | --- | --- |
//! | [`cycle`] | a plain CUDA process and a torch process, as root and as uid 1000: idle, offloaded, restored, same results |
//! | [`no_checkpoint`] | a program that ends if the driver's checkpoint is called in it: engine `auto` makes no such call |
//! | [`hidden`] | a call that bypasses the hooks while the process is offloaded: the process is restored, and its context is not checkpointed again |
//! | [`crashers`] | the five calls that end a program: with the library 30 of 30 calls return, without it the program ends |
//! | [`no_controller`] | a process that makes a call without a controller restores itself |
//! | [`oversubscription`] | three containers work in bursts while VRAM suffices for one, and a fourth waits to allocate most of that VRAM: no container fails |
//! | [`witness`] | a kernel that runs without further calls prevents its container's offload |
//! | [`connection`] | a network connection restores a container before the container makes a call, if its annotation enables this |
//! | [`immediate`] | restore policy `immediate`: a container in use is offloaded, and a container that cannot be moved is ended |
//! | [`engines`] | comparison of the engines: times of offload and wake, VRAM that stays in use, contents, speed of allocations |
//! | [`dedup`] | two containers with equal contents: the contents are stored once |
//! | [`mod@programs`] | programs that use transformers, cuDNN, CUDA graphs, CuPy, Triton, streams or two processes: the same results with each engine; a separate part |
//! | [`mod@gpus`] | restores on another GPU, and programs that share memory between processes or GPUs |
//! | [`nvml`] | NVML queries from C and from pynvml while the process is offloaded: same results, no wake |
//! | [`mod@steps`] | time of a program's steps with Affinode, compared with the stock runtime; a separate part |
//! | [`tools`] | torch.profiler before, during and after an offload, NVTX, compute-sanitizer, ncu, NVDEC: no process hangs or is lost |
//! | [`jax`] | JAX with each engine, and the calls that an idle JAX makes |
//! | [`calibration`] | measures the costs of moves, and writes a file for `affinode simulate`; a separate part |
//! | [`mod@host_memory`] | more offloads at once than host memory holds: no container is killed; a separate part |
//! | [`host_pool`] | containers whose memory limit is below their VRAM |
//! | [`exchange`] | two containers take turns on VRAM for one of them: how long a call waits |
//! | [`given_up`] | a CUDA call during an offload cancels it: how long the call waits |
//! | [`vram_limit`] | the VRAM limit of a container with a C program, torch, CuPy or JAX; its cost; containers whose limits together are 2.4 times the free VRAM |
//! | [`recording`] | records the dashboard's stream, for a replay on another machine; a separate part |
//! | [`cost`] | a hooked call compared with a direct call; a torch step with and without the library; a wake compared with the driver's own restore; a wake while another container attacks the controller |
//!
//! [`run`] does not run the separate parts. Each of them has its own function and testbed. Parts
//! that need no torch also run on the simulated GPU.

mod calibration;
mod connection;
mod cost;
mod crashers;
mod cycle;
mod dedup;
mod disk;
mod engines;
mod exchange;
mod given_up;
mod goals;
mod gpus;
mod hidden;
mod host_memory;
mod host_pool;
mod host_root;
mod immediate;
mod jax;
mod mps;
mod no_checkpoint;
mod no_controller;
mod nvml;
mod oversubscription;
mod programs;
mod python;
mod recording;
mod repeated_offload;
mod report;
mod steps;
mod tools;
mod torch;
mod vram_limit;
mod witness;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    cli::Node,
    gpu::{self, Gpu},
    release::Release,
    testbed::{Testbed, TestbedConfig},
    wait::{until, until_within},
};

pub use calibration::{Calibration, measure as calibrate};
pub use connection::connect;
pub use cost::wake_ms;
pub use gpus::{links::without_affinode as measure_links, together::wakes as woken_together};
pub use host_memory::oversubscribed as host_memory;
pub use immediate::{CONFIG as IMMEDIATE, takes_room as takes_room_at_once};
pub use no_checkpoint::default_makes_no_call;
pub use oversubscription::oversubscribed;
pub use report::{Report, Rows};

/// Affinode's configuration for the suite, with an idle timeout of one second and almost no minimum
/// residency.
const CONFIG: &str = r#"
[policy]
mode = "eager"
idle_timeout = "1s"
minimum_residency = "1ms"
[[policy.namespace]]
name = "together"
dedup = true
[timing]
sample_interval = "100ms"
[log]
level = "info,affinode_controller::agents=debug"
"#;
/// Annotation of a container that is offloaded only on request.
const BY_ORDER: (&str, &str) = ("affinode.io/offload", "manual");

/// Runs the parts whose names contain one of the words in `wanted`, with this containerd and GPU.
/// Runs all parts if `wanted` is empty. If a part fails, the report contains the error and the
/// other parts still run.
///
/// # Errors
/// When no testbed can be created.
pub fn run(release: &Release, gpu: Gpu, wanted: &[&str]) -> Result<Report> {
    let world =
        TestbedConfig::default().release(release).gpu(gpu.clone()).config(CONFIG).world()?;
    let mut report = Report::new(&world, wanted);
    report.part(&world, "plain process, root", |world, rows| cycle::plain(world, "root", rows));
    report.part(&world, "plain process, uid 1000", |world, rows| cycle::plain(world, "user", rows));
    report.part(&world, "crashing calls", crashers::with_and_without);
    report.part(&world, "hidden way", hidden::hidden_call_restores);
    report.part(&world, "no call of the checkpoint", no_checkpoint::default_makes_no_call);
    report.part(&world, "no controller", no_controller::comes_back);
    report.part(&world, "more wanted than there is", oversubscription::oversubscribed);
    report.part(&world, "work without calls", witness::work_without_calls);
    report.part(&world, "a connection wakes", connection::brings_back);
    report.part(&world, "NVML while offloaded", nvml::plain);
    report.part(&world, "cost of a call", cost::calls);
    report.part(&world, "cost of watched calls", cost::watched_calls);
    report.part(&world, "cost of a wake", cost::wakes);
    report.part(&world, "under attack", cost::under_attack);
    report.part(&world, "engines, semantics", engines::semantics);
    report.part(&world, "engines, memory", engines::memory);
    report.part(&world, "engines, side by side", engines::side_by_side);
    report.part(&world, "engines, mapped by itself", engines::segments);
    report.part(&world, "engines, pools", engines::pools);
    report.part(&world, "engines, prepared", engines::prepared);
    report.part(&world, "engines, checked", engines::checked);
    report.part(&world, "engines, four processes", engines::four_processes);
    report.part(&world, "engines, held once", dedup::held_once);
    report.part(&world, "engines, large", engines::large);
    report.part(&world, "host pool, limited container", host_pool::limited);
    report.part(&world, "calls during an offload", given_up::calls);
    report.part(&world, "MPS", mps::clients);
    vram_limit::plain(&world, &mut report);
    match python::Python::find(&world) {
        Ok(python) => {
            with_python(&mut report, &python);
            gpus::all(&world, Some(&python), &mut report);
        }
        Err(why) => {
            report.skip("torch", &format!("{why:#}"));
            gpus::all(&world, None, &mut report);
        }
    }
    finish(&world, &mut report);
    report.judge();
    drop(world);
    let part = "host pool, own memory instead";
    if report.wants(part) {
        let config = format!("{CONFIG}{}", host_pool::OFF);
        let world = TestbedConfig::default().release(release).gpu(gpu.clone()).config(&config);
        report.part(&world.world()?, part, host_pool::in_own_memory);
    }
    let part = "content on disk";
    if report.wants(part) {
        let folder = tempfile::tempdir_in("/var/tmp").context("cannot create a folder on disk")?;
        let config = format!("{CONFIG}{}", disk::config(folder.path()));
        let world = TestbedConfig::default().release(release).gpu(gpu.clone()).config(&config);
        let world = world.world()?;
        report.part(&world, part, |world, rows| disk::moves(world, folder.path(), rows));
        world.keep_logs();
    }
    for (part, own, layout) in [
        ("exchange", "", exchange::Layout::Pieces),
        ("exchange after a pause", "", exchange::Layout::PiecesAndPauses),
        ("exchange, own memory", host_pool::OFF, exchange::Layout::Pieces),
        ("exchange, one allocation", "", exchange::Layout::OneAllocation),
    ] {
        if !report.wants(part) {
            continue;
        }
        let config = format!("{CONFIG}{own}");
        let world = TestbedConfig::default().release(release).gpu(gpu.clone()).config(&config);
        let world = world.world()?;
        report.part(&world, part, |world, rows| exchange::in_turn(world, layout, rows));
        world.keep_logs();
    }
    let part = "restore policy immediate";
    if report.wants(part) {
        let world = TestbedConfig::default().release(release).gpu(gpu).config(IMMEDIATE).world()?;
        report.part(&world, part, takes_room_at_once);
    }
    Ok(report)
}

/// Runs the parts that need the machine's torch and JAX.
fn with_python(report: &mut Report, python: &python::Python) {
    let world = python.world;
    report.part(world, "NVML while offloaded, pynvml", |_, rows| nvml::python(python, rows));
    report.part(world, "torch, root", |_, rows| torch::cycle(python, "root", rows));
    report.part(world, "torch, uid 1000", |_, rows| torch::cycle(python, "user", rows));
    report.part(world, "engines, torch", |_, rows| torch::ENGINES.side_by_side(python, rows));
    report.part(world, "engines, torch inference", |_, rows| {
        torch::INFERENCE.side_by_side(python, rows)
    });
    report.part(world, "engines, growing segments of torch", |_, rows| {
        torch::SEGMENTS.side_by_side(python, rows)
    });
    report
        .part(world, "engines, pools of torch", |_, rows| torch::POOLS.side_by_side(python, rows));
    report.part(world, "MPS, daemon inside", |_, rows| mps::daemon_inside(python, rows));
    report.part(world, "MPS, torch", |_, rows| mps::torch(python, rows));
    report.part(world, "tools, profiler", |_, rows| tools::profiler(python, rows));
    report.part(world, "tools, NVTX", |_, rows| tools::ranges(python, rows));
    report.part(world, "tools, video", |_, rows| tools::video(python, rows));
    report.part(world, "tools, sanitizer and ncu", |_, rows| tools::wrappers(python, rows));
    let (engines, idle) = ("engines, JAX", "calls of an idle JAX");
    if python.has_jax() {
        report.part(world, engines, |_, rows| jax::ENGINES.side_by_side(python, rows));
        report.part(world, idle, |_, rows| jax::calls_while_idle(python, rows));
    } else {
        report.skip(engines, "python3 has no jax that sees the GPU");
    }
    report.part(world, "host pool, torch", |_, rows| host_pool::torch(python, rows));
    vram_limit::with_python(python, report);
    report.part(world, "cost of a torch step", |_, rows| torch::step_cost(python, rows));
}

/// Runs programs of many kinds (such as transformers, cuDNN, CUDA graphs, CuPy and Triton) with
/// each engine.
///
/// # Errors
/// When no testbed can be created.
pub fn programs(release: &Release, gpu: Gpu, words: &[&str]) -> Result<Report> {
    alone_with(release, gpu, words, programs::all)
}

/// Measures how long each step of a container's life takes (its start, its first call, an offload, a
/// restore), with Affinode and with the stock runtime.
///
/// # Errors
/// When no testbed can be created.
pub fn steps(release: &Release, gpu: Gpu, words: &[&str]) -> Result<Report> {
    alone_with(release, gpu, words, steps::all)
}

/// Runs one part of the suite in a separate testbed, and returns a separate report. `words` selects
/// tests of the part.
fn alone_with(
    release: &Release,
    gpu: Gpu,
    words: &[&str],
    parts: impl FnOnce(&Testbed, &mut Report),
) -> Result<Report> {
    let world = TestbedConfig::default().release(release).gpu(gpu).config(CONFIG).world()?;
    let mut report = Report::new(&world, words);
    parts(&world, &mut report);
    finish(&world, &mut report);
    Ok(report)
}

fn finish(world: &Testbed, report: &mut Report) {
    // If no part could run, no container has started a controller.
    let node = world.cli().ps_now().unwrap_or_default();
    if let Some(gpu) = node.gpus.first() {
        report.name_gpu(&gpu.name);
    }
    if report.broke() {
        world.show_logs();
    } else {
        world.keep_logs();
    }
}

/// Measures how long offloads and restores take with each engine. Writes a file
/// `calibration-ENGINE.toml` for each engine into `folder`, and returns the paths.
///
/// # Errors
/// When no testbed can be created, or a process does not move.
pub fn calibrations(release: &Release, gpu: Gpu, folder: &Path) -> Result<Vec<PathBuf>> {
    let world = TestbedConfig::default().release(release).gpu(gpu).config(CONFIG).world()?;
    let mut files = Vec::new();
    for engine in engines::ENGINES {
        let measured = calibrate(&world, engine)?;
        let name = world.cli().ps()?.gpus.first().map(|gpu| gpu.name.clone()).unwrap_or_default();
        let file = folder.join(format!("calibration-{engine}.toml"));
        measured.write(&file, engine, &name)?;
        files.push(file);
    }
    Ok(files)
}

/// Records the stream of events that the dashboard reads, on a node with three containers. Writes
/// the recording as files into `folder`, and returns their paths.
///
/// # Errors
/// When no testbed can be created, or a container does not start.
pub fn record(release: &Release, gpu: Gpu, folder: &Path) -> Result<Vec<PathBuf>> {
    let world = TestbedConfig::default().release(release).gpu(gpu).config(CONFIG).world()?;
    recording::record(&world, folder)
}

/// Waits until no copier registers or unregisters host memory. A copier registers the memory of
/// offloaded processes, and unregisters the memory of restored processes. The figure
/// `copier_registering` of `affinode ps` counts both.
fn wait_held(world: &Testbed) -> Result<()> {
    until("the copier", || {
        let gpus = world.cli().ps()?.gpus;
        Ok(gpus.iter().all(|gpu| gpu.copier_registering == 0).then_some(()))
    })
}

/// Waits until the host memory of `many` processes is prefaulted (touched and registered for their
/// next offload).
fn wait_prepared(world: &Testbed, many: usize) -> Result<()> {
    let mut last = Node::default();
    until_within(Duration::from_secs(30), "prefaulted host memory", || {
        last = world.cli().ps()?;
        let prepared: u32 = last.gpus.iter().map(|gpu| gpu.copier_prefaulted).sum();
        Ok((prepared as usize >= many).then_some(()))
    })
    .with_context(|| {
        format!("last reading: GPUs {:?}, containers {:?}", last.gpus, last.containers)
    })
}

/// Waits until the VRAM in use on the first GPU satisfies `wanted`, and returns it in bytes. The
/// copier's own VRAM is not included.
fn vram_used(world: &Testbed, wanted: impl Fn(u64) -> bool) -> Result<u64> {
    let mut last = 0;
    until("the VRAM in use to change", || {
        last = match world.gpu() {
            Gpu::Real => gpu::nvidia_smi_used_bytes()?,
            Gpu::Simulated { .. } => {
                world.cli().ps()?.gpus.first().map_or(0, |gpu| gpu.vram_used_bytes)
            }
        };
        let copier = world.cli().ps()?.gpus.first().map_or(0, |gpu| gpu.copier_vram_bytes);
        last = last.saturating_sub(copier);
        Ok(wanted(last).then_some(last))
    })
    .with_context(|| format!("at last {last} bytes were in use"))
}

/// The median of the samples. It is 0 if there are no samples.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}
