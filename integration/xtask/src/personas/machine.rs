//! A testbed that looks like a machine with one GPU on which Affinode was never installed. The
//! folders and sockets that programs expect are private to the testbed.

use std::{fs, path::Path};

use affinode_e2e::{
    artifacts::Artifacts,
    containerd,
    gpu::Gpu,
    image,
    release::Release,
    testbed::{PLENTY_BYTES, Testbed, TestbedConfig},
};
use anyhow::Result;

/// VRAM in MiB that the program of the image fills.
pub const VRAM_MIB: u64 = 64;
/// Configuration of Affinode on the node. The idle timeout is one second instead of five minutes.
pub const CONFIG: &str = "[policy]\nidle_timeout = \"1s\"\n";
/// Folder of the image that contains the CUDA programs.
const CLIENTS: &str = "/opt/clients";

/// The container engine of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// dockerd, with a containerd without CRI.
    Docker,
    /// containerd with CRI, as a distribution configures it.
    Containerd,
}

/// Starts a machine whose containerd finds Affinode's programs in the folders to which an
/// installation copies them.
pub fn start(artifacts: &Artifacts, release: &Release, engine: Engine) -> Result<Testbed> {
    let recipe = TestbedConfig::default();
    let recipe = match engine {
        Engine::Docker => recipe.docker(),
        Engine::Containerd => recipe.node(),
    };
    let world = recipe
        .default_engine()
        .artifacts(artifacts.clone())
        .release(release)
        .gpu(Gpu::Simulated { vram_bytes: PLENTY_BYTES })
        .config(CONFIG)
        .env("AFFINODE_LIB_DIR", "/usr/local/lib/affinode")
        .env("AFFINODE_RUN_DIR", "/run/affinode")
        .world()?;
    places(&world)?;
    Ok(world)
}

/// Hides folders of the real machine from the testbed: mounts empty or private folders over the
/// folders that an installation reads or changes. This also hides systemd, so that no unit of the
/// real machine is changed.
fn places(world: &Testbed) -> Result<()> {
    let script = r#"
        set -e
        for folder in /run /usr/local; do mount -t tmpfs -o mode=0755 tmpfs $folder; done
        mkdir -p /usr/local/bin /run/containerd /run/affinode "$1/run"
        mount --bind "$1/run" /run/affinode
        ln -s "$1/docker.sock" /run/docker.sock
        ln -s "$1/containerd.sock" /run/containerd/containerd.sock
        for folder in /etc /var/lib; do
            layers="$1/store/user$folder"
            mkdir -p "$layers/upper" "$layers/work"
            mount -t overlay -o "lowerdir=$folder,upperdir=$layers/upper,workdir=$layers/work" overlay $folder
        done
        rm -rf /etc/affinode /etc/docker /etc/containerd /var/lib/affinode
    "#;
    let mut command = world.keeper().command(Path::new("sh"));
    containerd::run(command.args(["-c", script, "sh"]).arg(world.dir())).map(|_| ())
}

/// Builds the file system of an image in which `python3` is a CUDA program. The program reads
/// commands from its terminal.
pub fn layer(world: &Testbed) -> Result<Vec<u8>> {
    let mut layer = image::usual_layer()?;
    let program = affinode_e2e::worker::USUAL;
    let host = world.artifacts().clients_dir().join(program);
    layer.copy(&host, &Path::new(CLIENTS).join(program))?;
    let python = format!("#!/bin/sh\nexec {CLIENTS}/{program} --mib {VRAM_MIB}\n");
    layer.file("usr/local/bin/python3", 0o755, python.as_bytes())?;
    layer.finish()
}

/// Writes the image's file system to a tar file that `docker import` can read. Returns the file's
/// path.
pub fn write_layer(world: &Testbed) -> Result<std::path::PathBuf> {
    let file = world.dir().join("persona-image.tar");
    fs::write(&file, layer(world)?)?;
    Ok(file)
}
