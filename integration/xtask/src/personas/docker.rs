//! Plays an engineer with one machine, one GPU and Docker.

use std::fs;

use affinode_e2e::{
    artifacts::Artifacts,
    docker::{Docker, DockerPrograms},
    nvidia_hook,
    release::Release,
    testbed::Testbed,
};
use anyhow::{Context, Result};

use super::{Outcome, Ran, document::DocLine, machine, plays, shell::Shell};

/// Runs the persona's commands. The last step starts the container, on a terminal.
pub fn run(lines: &[DocLine], artifacts: &Artifacts, release: &Release) -> Result<Ran> {
    let Some(programs) = DockerPrograms::find(artifacts) else {
        return Ok((Outcome::NotRun("this machine can have no dockerd".into()), Vec::new()));
    };
    let world = machine::start(artifacts, release, machine::Engine::Docker)?;
    let tools = programs.command.parent().context("docker has a folder")?.to_owned();
    let outcome = start(&world, programs).and_then(|_docker| {
        let mut shell = Shell::new(&world, &[&tools])?;
        let seen = plays::on_a_terminal(&world, &mut shell, lines)?;
        Ok((Outcome::Passed(seen), shell.substitutions().to_vec()))
    });
    outcome.inspect_err(|_| world.show_logs())
}

/// Starts dockerd with NVIDIA's hook, and imports an image under the name of PyTorch's image.
fn start(world: &Testbed, programs: DockerPrograms) -> Result<Docker<'_>> {
    let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
    nvidia_hook::place(&world.dir().join("hooks"), world.dir(), &parts.mounts)?;
    let docker = Docker::start(world, programs, "{}")?;
    let file = machine::write_layer(world)?;
    let changes: Vec<String> = (parts.env.iter())
        .filter(|(name, _)| *name != "NVIDIA_VISIBLE_DEVICES")
        .map(|(name, value)| format!("--change=ENV {name}={value}"))
        .collect();
    let mut words = vec!["import"];
    words.extend(changes.iter().map(String::as_str));
    let path = file.display().to_string();
    words.extend([path.as_str(), "pytorch/pytorch"]);
    docker.run(&words)?;
    fs::remove_file(file)?;
    Ok(docker)
}
