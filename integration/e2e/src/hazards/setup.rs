//! Hazards in which Affinode cannot manage a process: never, for example on a MIG instance, or not
//! at present, for example while the process is stopped by a signal.

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{
    Case, Found,
    manual_ops::{intact, offload_once, refused, usual},
};
use crate::{
    chaos::fault,
    container::{CLIENTS, PIPES, Spec},
    testbed::Testbed,
    worker::{USUAL, Worker},
};

/// Name prefix of the driver's checkpoint functions. Drivers before release 570 do not have them.
const ENTRY_POINTS: &[u8] = b"cuCheckpointProcess";

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("MPS", mps).simulated("no MPS daemon runs here"),
        Case::new("no checkpoint entry points in libcuda", old_driver)
            .simulated("this driver has them"),
        Case::new("GPU cut into MIG instances", mig).simulated("the GPU's mode is left alone"),
        Case::new("library disabled in the container", disabled),
        Case::new("CUDA process seen by NVML alone", stranger),
        Case::new("frozen cgroup", frozen),
        Case::new("process stopped by a signal", stopped),
    ]
}

/// Starts a container. Requires that its offload is refused with this reason and that its program
/// still works.
fn stays(world: &Testbed, spec: Spec, reason: &str) -> Result<Found> {
    let id = spec.id.clone();
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let with = refused(world, &id, reason)?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}

fn mps(world: &Testbed) -> Result<Found> {
    // libcuda looks for the control pipe of MPS in this folder. Affinode must detect the pipe even
    // if no MPS server runs.
    let host = world.dir().join("mps");
    std::fs::create_dir_all(&host)?;
    std::fs::write(host.join("control"), "")?;
    let mount = format!("type=bind,src={},dst=/mps,options=rbind:ro", host.display());
    let spec = usual("mps", 16).env("CUDA_MPS_PIPE_DIRECTORY", "/mps");
    stays(world, spec.flags(&["--mount", &mount]), "mps")
}

fn mig(world: &Testbed) -> Result<Found> {
    stays(world, usual("mig", 16).env("CUDA_VISIBLE_DEVICES", "2"), "mig")
}

/// Runs a container with a library of the simulated driver from which the symbols of the checkpoint
/// functions were removed. The offload must be refused with the reason `driver-too-old`, and the
/// program must still work.
fn old_driver(world: &Testbed) -> Result<Found> {
    let host = world.dir().join("old-driver");
    std::fs::create_dir_all(&host)?;
    let library = std::fs::read(world.artifacts().sim_dir().join("libcuda.so.1"))?;
    let library = without_symbols(library, ENTRY_POINTS)
        .context("cannot change the symbols of the simulated libcuda.so.1")?;
    std::fs::write(host.join("libcuda.so.1"), library)?;
    let mount = format!("type=bind,src={},dst=/old-driver,options=rbind:ro", host.display());
    let spec = usual("old", 16).env("LD_LIBRARY_PATH", "/old-driver");
    stays(world, spec.flags(&["--mount", &mount]), "driver-too-old")
}

/// Edits an ELF library so that it no longer defines the dynamic symbols with this prefix. They
/// become undefined and weak.
fn without_symbols(mut elf: Vec<u8>, prefix: &[u8]) -> Option<Vec<u8>> {
    const DYNSYM: u64 = 11;
    const SYMBOL_BYTES: u64 = 24;
    const WEAK_FUNCTION: u8 = 0x22;
    fn number(elf: &[u8], at: u64, bytes: usize) -> Option<u64> {
        let at = usize::try_from(at).ok()?;
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(elf.get(at..at + bytes)?);
        Some(u64::from_le_bytes(word))
    }
    // Section headers: their offset, size and number.
    let (table, size, count) =
        (number(&elf, 0x28, 8)?, number(&elf, 0x3a, 2)?, number(&elf, 0x3c, 2)?);
    let section = |elf: &[u8], n: u64| -> Option<(u64, u64, u64, u64)> {
        let at = table + n * size;
        let (kind, offset) = (number(elf, at + 4, 4)?, number(elf, at + 0x18, 8)?);
        Some((kind, offset, number(elf, at + 0x20, 8)?, number(elf, at + 0x28, 4)?))
    };
    let (_, symbols, bytes, link) =
        (0..count).filter_map(|n| section(&elf, n)).find(|s| s.0 == DYNSYM)?;
    let (_, names, ..) = section(&elf, link)?;
    for at in (symbols..symbols + bytes).step_by(SYMBOL_BYTES as usize) {
        let name = usize::try_from(names + number(&elf, at, 4)?).ok()?;
        if elf.get(name..)?.starts_with(prefix) {
            let entry = elf.get_mut(usize::try_from(at).ok()?..)?.get_mut(4..24)?;
            entry.fill(0);
            entry[0] = WEAK_FUNCTION;
        }
    }
    Some(elf)
}

fn disabled(world: &Testbed) -> Result<Found> {
    let spec = usual("disabled", 16).env("AFFINODE_DISABLE", "1");
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let said = offload_once(world, "disabled")?;
    ensure!(
        !said.done && said.reason == "not-registered",
        "expected a refusal for not-registered, got {said:?}"
    );
    intact(&mut worker)?;
    let with = format!("refused: {}; contents intact", said.reason);
    Ok(Found::Row { without: "-".into(), with })
}

/// Runs a container with two CUDA processes, one of which has not loaded Affinode's library. The
/// offload must be refused with the reason `unmanaged-process`, and the memory of the process with
/// the library must be unchanged.
fn stranger(world: &Testbed) -> Result<Found> {
    let program = format!("{CLIENTS}/{USUAL}");
    let script = format!(
        "AFFINODE_DISABLE=1 {program} --mib 4 --script 'sleep 600000' >{PIPES}/other.log </dev/null &\n\
         exec {program} --mib 16 --seed 5"
    );
    let spec = Spec::gpu("stranger", &["/bin/sh", "-c", &script]);
    let id = spec.id.clone();
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    let log = world.dir().join("io").join(&id).join("other.log");
    crate::wait::until("the other process to be restored", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        Ok(text.contains("\"fill\"").then_some(()))
    })?;
    let with = refused(world, &id, "unmanaged-process")?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}

fn frozen(world: &Testbed) -> Result<Found> {
    let mut worker = Worker::start(world, "frozen", 16)?;
    let folder = fault::freezer(world, "frozen").context("the container has no freezer cgroup")?;
    fault::set_frozen(&folder, true)?;
    let with = refused(world, "frozen", "frozen");
    fault::set_frozen(&folder, false)?;
    let with = with?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}

fn stopped(world: &Testbed) -> Result<Found> {
    let mut worker = Worker::start(world, "stopped", 16)?;
    let pid = Pid::from_raw(worker.running.pid(world)?);
    kill(pid, Signal::SIGSTOP)?;
    let with = refused(world, "stopped", "frozen");
    kill(pid, Signal::SIGCONT)?;
    let with = with?;
    intact(&mut worker)?;
    Ok(Found::Row { without: "-".into(), with })
}
