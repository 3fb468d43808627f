//! Helpers for the commands `docker` and `podman`. Both commands accept the flags that this module
//! uses.

use anyhow::Result;

use crate::{
    container::{CLIENTS, PIPES, make_pipes, piped},
    image,
    testbed::Testbed,
    worker::{USUAL, Worker},
};

/// Returns the flags of `docker run` or `podman run` that give a container the testbed's GPU.
///
/// # Errors
/// When a file that the GPU needs cannot be found.
pub fn gpu_flags(world: &Testbed) -> Result<Vec<String>> {
    let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
    let mut flags = Vec::new();
    for (name, value) in &parts.env {
        flags.push(format!("--env={name}={value}"));
    }
    for device in &parts.devices {
        flags.push(format!("--device={}", device.display()));
    }
    for (host, inside) in &parts.mounts {
        flags.push(format!("--volume={}:{}:ro", host.display(), inside.display()));
    }
    Ok(flags)
}

/// Starts a container in the background, and waits until its CUDA program has filled `mib` MiB of
/// VRAM. `flags` are further flags of `docker run` or `podman run`. `run` executes the command and
/// returns the container's id.
///
/// # Errors
/// When the container does not start, or a CUDA call fails.
pub fn worker(
    world: &Testbed,
    name: &str,
    mib: u64,
    flags: &[String],
    run: impl FnOnce(&[&str]) -> Result<String>,
) -> Result<(String, Worker)> {
    let spec = Worker::spec(name, USUAL, mib);
    let pipes = make_pipes(world.dir(), name)?;
    let clients = world.artifacts().clients_dir();
    let mut words = vec!["run".into(), "--detach".into(), "--network=none".into()];
    words.push(format!("--name={name}"));
    words.push(format!("--volume={}:{CLIENTS}:ro", clients.display()));
    words.push(format!("--volume={}:{PIPES}", pipes.display()));
    words.extend_from_slice(flags);
    words.push(image::PLAIN.into());
    words.extend(piped(&spec.argv));
    let id = run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut worker = Worker::attach(&spec, &pipes)?;
    worker.wait_filled()?;
    Ok((id, worker))
}
