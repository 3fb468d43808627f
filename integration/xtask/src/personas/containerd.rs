//! Plays an engineer with one machine, one GPU, containerd and nerdctl. No package of Debian has
//! nerdctl, so `ctr` starts the container, from the same containerd and with the same runtime.

use std::fs;

use affinode_e2e::{
    artifacts::Artifacts, image::Archive, installed::Installation, nvidia_hook, release::Release,
    testbed::Testbed,
};
use anyhow::{Result, ensure};
use serde_json::json;

use super::{Outcome, Ran, document::DocLine, machine, plays, shell::Shell};

const IMAGE: &str = "docker.io/pytorch/pytorch:latest";
/// Parts of the document's nerdctl command, and the parts of the `ctr` command that replace them.
const STAND_INS: [(&str, &str); 3] = [
    ("nerdctl run", "ctr run"),
    ("--gpus all --name notebook -it", "--gpus 0 --tty"),
    (" pytorch/pytorch ", " docker.io/pytorch/pytorch:latest notebook "),
];

/// Runs the persona's commands. The last step starts the container, on a terminal.
pub fn run(lines: &[DocLine], artifacts: &Artifacts, release: &Release) -> Result<Ran> {
    let world = machine::start(artifacts, release, machine::Engine::Containerd)?;
    let outcome = prepare(&world).and_then(|installation| {
        let tools = [world.dir().join("tools"), world.containerd().release().bin_dir.clone()];
        let mut shell = Shell::new(&world, &[&tools[0], &tools[1]])?;
        for (from, to) in STAND_INS {
            shell.substitute(from, to, "nerdctl is in no package; ctr asks the same containerd");
        }
        let (seen, restarts) =
            installation.restarted(|| plays::on_a_terminal(&world, &mut shell, lines))?;
        ensure!(restarts == 1, "the installation restarted containerd {restarts} times");
        Ok((Outcome::Passed(seen), shell.substitutions().to_vec()))
    });
    outcome.inspect_err(|_| world.show_logs())
}

/// Imports an image under the name of PyTorch's image, and installs a program that replaces
/// NVIDIA's `nvidia-container-cli`. A test program in place of systemctl restarts containerd.
fn prepare(world: &Testbed) -> Result<Installation<'_>> {
    let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
    let env: Vec<String> =
        parts.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned();
    let env = [env, vec![path]].concat();
    let mut archive = Archive::default();
    archive.image(IMAGE, &machine::layer(world)?, &json!({"Env": env, "Cmd": ["/bin/sh"]}))?;
    let file = world.dir().join("persona-image.tar");
    archive.write(&file)?;
    world.containerd().import(world.keeper(), "default", &file)?;
    fs::remove_file(file)?;
    let installation = Installation::new(world, &world.prefix(), "affinode")?;
    nvidia_hook::place_cli(&world.dir().join("tools"), world.dir(), &parts.mounts)?;
    Ok(installation)
}
