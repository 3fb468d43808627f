//! Compares the engines (methods of moving GPU memory) with the same program. `checkpoint` uses
//! only the driver's checkpoint. `auto` copies memory and leaves the context on the device. `full`
//! copies memory, and checkpoints the context and all memory that was not copied.

use std::{thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{
    BY_ORDER,
    cycle::{EMPTY_BYTES, mib},
    median,
    report::Rows,
    vram_used, wait_held, wait_prepared,
};
use crate::{
    container::{CLIENTS, SEES_ITS_CGROUP, Spec},
    containerd::STOCK,
    gpu::Gpu,
    memory_cgroup::meminfo_bytes,
    testbed::{MIB, Testbed},
    wait::until,
    worker::{USUAL, Worker},
};

/// The engines that are compared. The first engine uses only the driver's checkpoint.
pub const ENGINES: [&str; 3] = ["checkpoint", "auto", "full"];
/// Name of the annotation that selects an engine.
pub const ENGINE: &str = "affinode.io/engine";
/// Pseudo engine name for a comparison: engine `full` in a container that retains its host copy.
pub const KEPT: &str = "kept";

/// Pseudo engine name for a comparison: engine `full` in a container whose host memory is
/// prefaulted (touched and registered) while it is idle.
pub const PREPARED: &str = "prepared";

/// Pseudo engine name for a comparison: engine `full` in a container that verifies its memory after
/// a restore.
pub const CHECKED: &str = "checked";

/// Adds the settings for an engine to a container's spec. `engine` may also be [`KEPT`],
/// [`PREPARED`] or [`CHECKED`].
pub fn moved_by(spec: Spec, engine: &str) -> Spec {
    match engine {
        KEPT => {
            let spec =
                spec.annotation(ENGINE, "full").annotation("affinode.io/retain-host-copy", "true");
            spec.flags(&SEES_ITS_CGROUP)
        }
        PREPARED => spec.prepared(),
        CHECKED => spec.annotation(ENGINE, "full").annotation("affinode.io/checksum", "true"),
        engine => spec.annotation(ENGINE, engine),
    }
}

/// Time after the release of memory until the GPU has surely scrubbed (cleared) it. Copies are
/// slower while the GPU scrubs. A program without Affinode copied at 49.7 GB/s directly after the
/// release of 60 GiB, and at 54.8 GB/s from 0.2 s after the release (H200, driver 580.159).
pub const SCRUBBED_AFTER: Duration = Duration::from_millis(500);

/// Delay between an offload and an early call. At the time of this call, the copier has not
/// registered all memory yet, and the GPU is still scrubbing (clearing) released memory.
const SOON: Duration = Duration::from_millis(300);

/// Load of a measurement: the size of a process's memory, and the number of its offloads. The
/// memory is filled with a pattern in which each word depends on its position. After every restore,
/// the memory is compared with the pattern.
struct Load {
    filled_mib: u64,
    /// Number of allocations of the size `filled_mib` in addition to the first one.
    more: u64,
    rounds: usize,
}

impl Load {
    fn bytes(&self) -> u64 {
        self.filled_mib * (1 + self.more) * MIB
    }
}

/// Compares the engines with a small process. The copy of little memory takes almost no time, so
/// the measured times show the other costs. [`super::torch`] uses a larger process.
pub fn side_by_side(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = match world.gpu() {
        Gpu::Real => Load { filled_mib: 1024, more: 0, rounds: 7 },
        Gpu::Simulated { .. } => Load { filled_mib: 64, more: 0, rounds: 3 },
    };
    ENGINES.iter().try_for_each(|engine| cycles(world, rows, engine, &load))
}

/// Compares the engines with a process so large that the driver's checkpoint alone would take
/// minutes.
pub fn large(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = match world.gpu() {
        Gpu::Real => Load { filled_mib: 4096, more: 14, rounds: 5 },
        Gpu::Simulated { .. } => Load { filled_mib: 256, more: 5, rounds: 2 },
    };
    let mib = (load.bytes() / MIB).to_string();
    let bare = Spec::gpu("bare", &[&format!("{CLIENTS}/memory_cost"), "large", &mib]);
    let text = bare.annotation(BY_ORDER.0, BY_ORDER.1).runtime(STOCK).run(world)?;
    let bare: Figure =
        serde_json::from_str(&text).context("cannot parse the output of memory_cost large")?;
    let size = format!("a bare program, {:.1} GiB", load.bytes() as f64 / (1 << 30) as f64);
    rows.tell(&format!("{size}: pinned copy in"), load.bytes() as f64 * 1e3 / bare.value, "ms");
    rows.tell(&format!("{size}: pinned copy in"), bare.value / 1e9, "GB/s");
    ["auto", "full", KEPT, PREPARED]
        .iter()
        .try_for_each(|engine| cycles(world, rows, engine, &load))
}

/// Returns a load of medium size for this GPU.
fn medium(world: &Testbed) -> Load {
    match world.gpu() {
        Gpu::Real => Load { filled_mib: 4096, more: 1, rounds: 5 },
        Gpu::Simulated { .. } => Load { filled_mib: 64, more: 1, rounds: 3 },
    }
}

/// Measures offloads and restores of a container whose host memory is prefaulted (touched and
/// registered before an offload).
pub fn prepared(world: &Testbed, rows: &mut Rows) -> Result<()> {
    cycles(world, rows, PREPARED, &medium(world))
}

/// Number of processes in the container that [`four_processes`] starts.
const PROCESSES: u64 = 4;

/// Measures offloads and restores of a container with four processes. The default engine copies
/// their memory at the same time.
pub fn four_processes(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (mib, rounds) = match world.gpu() {
        Gpu::Real => (2048, 5),
        Gpu::Simulated { .. } => (64, 2),
    };
    let one = format!("{CLIENTS}/{USUAL} --mib {mib}");
    // `sleep` keeps the standard input of each process open, because a process ends when its input
    // ends.
    let script = format!("for n in 1 2 3 4; do sleep 600 | {one} --seed $n & done; wait");
    let id = "four";
    let spec = Spec::gpu(id, &["/bin/sh", "-c", &script]).annotation(ENGINE, "auto");
    let running = spec.annotation(BY_ORDER.0, BY_ORDER.1).start(world)?;
    world.cli().wait_for(id, "to have filled its memory", |row| {
        let filled: u64 = row.processes.iter().map(|process| process.swappable_bytes).sum();
        row.processes.len() as u64 == PROCESSES && filled >= PROCESSES * mib * MIB
    })?;
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        world.cli().move_out(id)?;
        out.push(world.cli().known(id)?.last_offload_ms as f64);
        if matches!(world.gpu(), Gpu::Real) {
            thread::sleep(SCRUBBED_AFTER);
        }
        world.cli().run(&["restore", id])?;
        back.push(world.cli().known(id)?.last_wake_ms as f64);
    }
    let size = format!("4 processes of {:.1} GiB", mib as f64 / 1024.0);
    rows.tell(&format!("{size}: offload"), median(&out), "ms");
    rows.tell(&format!("{size}: restore"), median(&back), "ms");
    running.kill(world)?;
    running.delete(world)
}

/// Measures the cost of verifying restored memory, and checks that corruption is detected.
pub fn checked(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let load = medium(world);
    ["full", CHECKED].iter().try_for_each(|engine| cycles(world, rows, engine, &load))?;
    let spec = Worker::spec("stray", USUAL, 1024).annotation(BY_ORDER.0, BY_ORDER.1);
    let mut worker = Worker::start_as(world, moved_by(spec, CHECKED))?;
    worker.wait_filled()?;
    world.cli().move_out("stray")?;
    worker.call("stray")?;
    let result = worker.ask("sync")?.result;
    let what = "overwritten in host memory: every call fails";
    rows.want(what, f64::from(result), "", "214, uncorrectable ECC", result == 214);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Waits until the node has enough free host memory for an offload of `bytes`. After a restore of
/// 60 GiB, the process needs seconds to free its host memory. Until then the controller may refuse
/// the next offload.
fn wait_host_memory(world: &Testbed, bytes: u64) -> Result<()> {
    if matches!(world.gpu(), Gpu::Simulated { .. }) {
        return Ok(());
    }
    until("host memory for the next offload", || {
        let free = meminfo_bytes("MemAvailable:").context("/proc/meminfo cannot be read")?;
        let all = meminfo_bytes("MemTotal:").context("/proc/meminfo cannot be read")?;
        // The node keeps a sixteenth of its host memory in reserve, and an offload takes slightly
        // more host memory than the process's bytes.
        Ok((free > bytes + bytes / 16 + all / 16).then_some(()))
    })
}

fn cycles(world: &Testbed, rows: &mut Rows, engine: &str, load: &Load) -> Result<()> {
    let size = format!("{engine}, {:.1} GiB", load.bytes() as f64 / (1 << 30) as f64);
    let id = format!("engine-{engine}");
    let spec = Worker::spec(&id, USUAL, load.filled_mib).annotation(BY_ORDER.0, BY_ORDER.1);
    // The container that ran before with another engine may not have freed its host memory yet.
    wait_host_memory(world, load.bytes())?;
    let mut worker = Worker::start_as(world, moved_by(spec, engine))?;
    worker.wait_filled()?;
    for _ in 0..load.more {
        worker.call(&format!("alloc {}", load.filled_mib))?;
    }
    let (mut out, mut back, mut offloaded, mut good) = (Vec::new(), Vec::new(), 0, 0);
    let filled = fills(world)?;
    let copied = copies(world)?;
    // A copier with registered host memory needs VRAM for page tables.
    let few = EMPTY_BYTES + load.bytes() / 512;
    let left = if engine == "auto" { load.bytes() / 2 + EMPTY_BYTES } else { few };
    for _ in 0..load.rounds {
        wait_held(world)?;
        if !matches!(engine, KEPT | PREPARED) {
            wait_host_memory(world, load.bytes())?;
        }
        if engine == PREPARED {
            wait_prepared(world, 1)?;
        }
        world.cli().move_out(&id)?;
        out.push(world.cli().known(&id)?.last_offload_ms as f64);
        offloaded = vram_used(world, |used| used <= left)?;
        wait_held(world)?;
        if matches!(world.gpu(), Gpu::Real) {
            thread::sleep(SCRUBBED_AFTER);
        }
        back.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
        good += usize::from(worker.check(load.bytes())?);
    }
    wait_held(world)?;
    let filled = fills(world)?.saturating_sub(filled) as usize;
    let copied = copies(world)?.saturating_sub(copied) as usize;
    if !matches!(engine, KEPT | PREPARED) {
        wait_host_memory(world, load.bytes())?;
    }
    let soon = called_soon(world, engine, &mut worker)?;
    good += usize::from(worker.check(load.bytes())?);
    let rate = |ms: f64| load.bytes() as f64 / ms.max(0.001) / 1e6;
    if engine == KEPT {
        let row = world.cli().known(&id)?;
        let share = row.processes.first().map_or(0, |p| p.unchanged_bytes) as f64;
        let share = share / load.bytes() as f64 * 100.0;
        rows.want(&format!("{size}: not copied again"), share, "%", "all of it", share >= 99.9);
    }
    // A GPU machine has enough cores for the copier to register all memory in time.
    let mut through_copier = |what: &str, times: usize| match world.gpu() {
        Gpu::Real => rows.count(what, times, load.rounds),
        Gpu::Simulated { .. } => {
            rows.want(what, times as f64, "", "half", 2 * times >= load.rounds);
        }
    };
    if engine == "full" {
        through_copier(&format!("{size}: wakes through the copier"), filled);
    }
    if engine == PREPARED {
        through_copier(&format!("{size}: copied out by the copier"), copied);
    }
    rows.tell(&format!("{size}: first offload"), out[0], "ms");
    // The first offload has no retained copy yet, so it does not count.
    let out = median(&out[usize::from(engine == KEPT)..]);
    rows.tell(&format!("{size}: offload"), out, "ms");
    rows.tell(&format!("{size}: offload"), rate(out), "GB/s");
    rows.tell(&format!("{size}: wake"), median(&back), "ms");
    rows.tell(&format!("{size}: wake"), rate(median(&back)), "GB/s");
    rows.tell(&format!("{size}: wake, called 0.3 s after the offload"), soon, "ms");
    let what = format!("{size}: device in use, offloaded");
    if engine == "auto" {
        rows.tell(&what, mib(offloaded), "MiB");
    } else {
        rows.want(&what, mib(offloaded), "MiB", "a few MiB", offloaded <= few);
    }
    if engine != "checkpoint" {
        let row = world.cli().known(&id)?;
        let share = row.processes.first().map_or(0, |p| p.swappable_bytes) as f64;
        let share = share / load.bytes() as f64 * 100.0;
        rows.want(&format!("{size}: share copied_out"), share, "%", "all of it", share >= 99.9);
    }
    good += usize::from(worker.verify()?);
    let times = load.rounds + 2;
    rows.count(&format!("{size}: all contents as before, after each return"), good, times);
    worker.running.kill(world)?;
    worker.running.delete(world)
}

/// Offloads the container, and makes a CUDA call [`SOON`] afterwards. At that time the copier has
/// not registered all host memory yet, and the GPU is still scrubbing (clearing) the released VRAM.
/// Returns the time that the call waits, in milliseconds.
fn called_soon(world: &Testbed, engine: &str, worker: &mut Worker) -> Result<f64> {
    if engine == PREPARED {
        wait_prepared(world, 1)?;
    }
    world.cli().move_out(&worker.running.id)?;
    thread::sleep(SOON);
    Ok(worker.call("streamsync")?.elapsed_us as f64 / 1000.0)
}

/// Number of restores that copiers (processes that copy VRAM for others) have performed so far.
fn fills(world: &Testbed) -> Result<u64> {
    Ok(world.cli().ps()?.gpus.iter().map(|gpu| gpu.copier_restores).sum())
}

/// Number of offloads that copiers (processes that copy VRAM for others) have performed so far.
pub fn copies(world: &Testbed) -> Result<u64> {
    Ok(world.cli().ps()?.gpus.iter().map(|gpu| gpu.copier_offloads).sum())
}

/// Measures how long offloads and restores take in a program that maps its memory in pieces, as
/// some allocators do. Then offloads the program after each kind of change of the mappings, and
/// verifies its memory.
pub fn segments(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (size_mib, rounds) = match world.gpu() {
        Gpu::Real => (4096, 5),
        Gpu::Simulated { .. } => (128, 2),
    };
    for engine in ENGINES {
        let id = format!("segments-{engine}");
        let spec = Worker::segments(&id, engine, size_mib).annotation(BY_ORDER.0, BY_ORDER.1);
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            world.cli().move_out(&id)?;
            out.push(world.cli().known(&id)?.last_offload_ms as f64);
            wait_held(world)?;
            back.push(worker.call("streamsync")?.elapsed_us as f64 / 1000.0);
        }
        let size = format!("{engine}, {:.1} GiB in pieces of 4 MiB", size_mib as f64 / 1024.0);
        rows.tell(&format!("{size}: offload"), median(&out), "ms");
        rows.tell(&format!("{size}: wake"), median(&back), "ms");
        let mut good = usize::from(worker.verify()?);
        let mut tried = 1;
        if engine != "checkpoint" {
            for (change, undo) in SEGMENT_TURNS {
                worker.call(change)?;
                world.cli().move_out(&id)?;
                let row = world.cli().known(&id)?;
                let copied_out = row.processes.first().map_or(0, |p| p.copied_out_bytes);
                rows.tell(&format!("{size}: copied, after {change}"), mib(copied_out), "MiB");
                good += usize::from(worker.call(undo)?.ok == Some(true) && worker.verify()?);
                tried += 1;
            }
        }
        worker.call("export")?;
        // The exported piece is not offloaded. With the engine `checkpoint`, the whole offload is
        // refused.
        let said = world.cli().offload(&id)?;
        let row = world.cli().known(&id)?;
        let refused = !said.done && said.reason == "shared-memory";
        let copied_out = row.processes.first().map_or(0, |p| p.copied_out_bytes);
        let stays = if engine == "checkpoint" { refused } else { said.done && copied_out > 0 };
        rows.count(&format!("{size}: the exported piece stays"), usize::from(stays), 1);
        good += usize::from(worker.verify()?);
        tried += 1;
        rows.count(&format!("{size}: contents as before"), good, tried);
        let ended = worker.ends_with_nothing_left(world)?;
        rows.count(&format!("{size}: nothing left in use"), usize::from(ended), 1);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

/// Runs the program that uses stream-ordered pools, with the stock runtime and with each engine.
/// Measures the offload and wake after each step of the program, and the time of one allocation and
/// free.
pub fn pools(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let size_mib = match world.gpu() {
        Gpu::Real => 4096,
        Gpu::Simulated { .. } => 128,
    };
    for engine in ["none"].into_iter().chain(ENGINES) {
        let id = format!("pools-{engine}");
        let is_moved = engine != "none";
        let mut spec = Worker::pools(&id, engine, size_mib).annotation(BY_ORDER.0, BY_ORDER.1);
        if !is_moved {
            spec = Worker::pools(&id, "checkpoint", size_mib).runtime(STOCK);
        }
        let mut worker = Worker::start_as(world, spec)?;
        worker.wait_filled()?;
        let what = format!("{engine}, {:.1} GiB of pools", size_mib as f64 / 1024.0);
        let mut good = 0;
        for turn in Worker::POOL_TURNS {
            let answer = worker.call(turn)?;
            if answer.ok != Some(true) {
                let line = f64::from(answer.line.unwrap_or(0));
                rows.tell(&format!("{what}: {turn}, not as expected in line"), line, "of pools.c");
            }
            if is_moved {
                world.cli().move_out(&id)?;
                let row = world.cli().known(&id)?;
                let copied_out = row.processes.first().map_or(0, |p| p.copied_out_bytes);
                rows.tell(&format!("{what}: copied, after {turn}"), mib(copied_out), "MiB");
                wait_held(world)?;
                let back_us = worker.call("streamsync")?.elapsed_us as f64;
                rows.tell(&format!("{what}: offload"), row.last_offload_ms as f64, "ms");
                rows.tell(&format!("{what}: wake"), back_us / 1000.0, "ms");
            }
            good += usize::from(answer.ok == Some(true) && worker.verify()?);
        }
        rows.count(&format!("{what}: as expected"), good, Worker::POOL_TURNS.len());
        let pairs_us = worker.call("cost")?.elapsed_us as f64 / 10_000.0;
        rows.tell(&format!("{what}: alloc and free of a held piece"), pairs_us, "us");
        worker.call("drop")?;
        if is_moved {
            let ended = worker.ends_with_nothing_left(world)?;
            rows.count(&format!("{what}: nothing left in use"), usize::from(ended), 1);
        }
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}

/// Pairs of commands for the program that maps its memory in pieces. The first command runs before
/// an offload, the second after it.
const SEGMENT_TURNS: [(&str, &str); 6] = [
    ("touch", "properties"),
    ("swap", "swap"),
    ("release", "retain"),
    ("replace", "streamsync"),
    ("readonly", "writable"),
    ("alias", "unalias"),
];

#[derive(Deserialize)]
struct Figure {
    what: String,
    value: f64,
}

/// Number of program starts with each kind of allocation. The kinds alternate. Several starts are
/// measured because the speed differs between starts.
const STARTS: usize = 7;

/// Compares the speed of swappable allocations (which the library can move) with the speed of the
/// driver's own allocations. Each result is the median over several starts of the program. Also
/// measures the speed of a copy from pinned memory.
pub fn memory(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let measure = |what: &[&str], runtime: Option<&str>| -> Result<Vec<Figure>> {
        let program = format!("{CLIENTS}/memory_cost");
        let argv: Vec<&str> = [program.as_str()].iter().chain(what).copied().collect();
        let mut spec = Spec::gpu("memory", &argv)
            .annotation(BY_ORDER.0, BY_ORDER.1)
            .annotation(ENGINE, "copy");
        if let Some(runtime) = runtime {
            spec = spec.runtime(runtime);
        }
        let text = spec.run(world)?;
        text.lines()
            .map(|line| {
                serde_json::from_str(line).context("cannot parse the output of memory_cost")
            })
            .collect()
    };
    let (mut direct, mut swappable) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        direct.push(measure(&[], Some(STOCK))?);
        swappable.push(measure(&[], None)?);
    }
    let names = |figures: &[Figure]| -> Vec<String> {
        figures.iter().map(|figure| figure.what.clone()).collect()
    };
    for figures in direct.iter().chain(&swappable) {
        ensure!(
            names(figures) == names(&direct[0]),
            "the starts of memory_cost measured different figures"
        );
    }
    for (index, Figure { what, .. }) in direct[0].iter().enumerate() {
        for (side, starts) in [("driver", &direct), ("swappable", &swappable)] {
            let took_us: Vec<f64> = starts.iter().map(|figures| figures[index].value).collect();
            rows.tell(&format!("alloc and free of {what}, {side}"), median(&took_us), "us");
        }
    }
    for figure in measure(&["copy"], Some(STOCK))? {
        rows.tell(&format!("pinned copy {}", figure.what), figure.value / 1e9, "GB/s");
    }
    Ok(())
}

/// Result of one checked call, parsed from a line of JSON.
#[derive(Debug, PartialEq, Deserialize)]
struct Check {
    command: String,
    result: i32,
    ok: Option<bool>,
}

/// Names of output lines that may differ between swappable memory (which the library can move) and
/// the driver's own memory. The size of swappable memory is rounded up to a multiple of 2 MiB. A
/// copy beyond the requested size is therefore refused only if it exceeds the rounded size. The
/// summary line `done` then differs as well.
const KNOWN: [&str; 2] = ["copy beyond the end", "done"];

/// Requires that each call on swappable memory (which the library can move) has the same result as
/// on the driver's own memory.
pub fn semantics(world: &Testbed, rows: &mut Rows) -> Result<()> {
    for (program, arguments) in [
        ("memory_check", &[][..]),
        ("api_check", &["memory", "pointers", "streams", "vmm", "share", "ipc"]),
    ] {
        let check = |id: &str, runtime: Option<&str>| -> Result<Vec<Check>> {
            let path = format!("{CLIENTS}/{program}");
            let argv: Vec<&str> = [path.as_str()].iter().chain(arguments).copied().collect();
            let mut spec =
                Spec::gpu(id, &argv).annotation(BY_ORDER.0, BY_ORDER.1).annotation(ENGINE, "copy");
            if let Some(runtime) = runtime {
                spec = spec.runtime(runtime);
            }
            // The exit status says whether all checks passed. Some checks can fail with the driver
            // itself, so the status is ignored.
            let output = spec.command(world, &["--rm"])?.output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let parse =
                |line| serde_json::from_str(line).context("cannot parse the line of a check");
            let checks: Vec<Check> = text.lines().map(parse).collect::<Result<_>>()?;
            let done = checks.last().is_some_and(|check| check.command == "done");
            ensure!(done, "{program} ended early: {}", String::from_utf8_lossy(&output.stderr));
            Ok(checks)
        };
        let own = check("own", Some(STOCK))?;
        let swappable = check("swappable", None)?;
        let pairs = own.iter().zip(&swappable).filter(|(own, _)| !KNOWN.contains(&&*own.command));
        let (same, other): (Vec<_>, Vec<_>) = pairs.partition(|(own, ours)| own == ours);
        let known = own.iter().filter(|check| KNOWN.contains(&&*check.command)).count();
        rows.count(&format!("{program}: as the driver's own"), same.len(), own.len() - known);
        ensure!(
            other.is_empty(),
            "{program}: results differ between the driver's own and swappable memory: {other:#?}"
        );
    }
    Ok(())
}
