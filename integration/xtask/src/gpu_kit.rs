//! `cargo xtask gpu-kit`: packs all files that a machine with a GPU needs to run the GPU suite into
//! one folder. The folder contains `run.sh` and `payload.tar.gz`.
//!
//! ```text
//!  payload.tar.gz
//!    affinode/     bin, lib, clients: as target/affinode/release, without debug symbols
//!    containerd/   containerd, ctr, containerd-shim-runc-v2, runc, libseccomp.so.2: Debian's files
//! ```

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{artifacts::target_dir, release::Release};
use anyhow::{Context, Result, bail};
use clap::Args;

use crate::{build, deps, output, sh};

/// Maximum size of the kit in bytes. It is limited because the kit is copied to other machines.
const LIMIT_BYTES: u64 = 60 << 20;
const RUN: &str = include_str!("kit/run.sh");
/// Binaries of Affinode that the GPU suite uses.
const BINARIES: [&str; 4] =
    ["affinode", "affinode-gpu-suite", "affinode-keeper", "containerd-shim-affinode-v1"];
/// Binaries of containerd's package that the GPU suite uses.
const CONTAINERD: [&str; 3] = ["containerd", "ctr", "containerd-shim-runc-v2"];

#[derive(Args)]
pub struct Options {
    /// Folder to create; target/gpu-kit if omitted. On the machine with the GPU, start its run.sh.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Builds the programs, packs the kit, and checks its size.
pub fn pack(options: &Options) -> Result<()> {
    let releases = deps::all()?;
    // The newest release, whose ctr can run containers as any user.
    let release = releases
        .available
        .iter()
        .max_by_key(|release| release.line)
        .context("no containerd is available")?;
    let built = build::all(build::Profile::Release)?;
    let out = options.out.clone().unwrap_or_else(|| target_dir().join("gpu-kit"));
    let staging = target_dir().join("gpu-kit-staging");
    fresh(&out)?;
    fresh(&staging)?;
    output::step("Packing");
    for binary in BINARIES {
        copy(&built.bin(binary)?, &staging.join("affinode/bin"), true)?;
    }
    copy_all(&built.lib_dir(), &staging.join("affinode/lib"), false)?;
    copy_all(&built.clients_dir(), &staging.join("affinode/clients"), false)?;
    copy_containerd(release, &staging.join("containerd"))?;

    let payload = out.join("payload.tar.gz");
    let mut tar = Command::new("tar");
    tar.arg("--create").arg("--file").arg(&payload).args([
        "--use-compress-program",
        "gzip -9",
        "--directory",
    ]);
    sh::run(tar.arg(&staging).args(["affinode", "containerd"]))?;
    let run = out.join("run.sh");
    fs::write(&run, RUN)?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))?;
    fs::remove_dir_all(staging)?;

    let size_bytes = fs::metadata(&payload)?.len() + fs::metadata(&run)?.len();
    if size_bytes > LIMIT_BYTES {
        bail!(
            "the kit has {} MiB, but at most {} MiB are allowed",
            size_bytes >> 20,
            LIMIT_BYTES >> 20
        );
    }
    output::out(&format!(
        "{}: {:.1} MiB, containerd {}",
        out.display(),
        size_bytes as f64 / f64::from(1 << 20),
        release.version
    ));
    Ok(())
}

fn copy_containerd(release: &Release, target: &Path) -> Result<()> {
    for binary in CONTAINERD {
        copy(&release.bin_dir.join(binary), target, false)?;
    }
    let runc = sh::find("runc").context("runc is not installed")?;
    copy(&runc, target, false)?;
    let needs = sh::read(Command::new("ldd").arg(&runc))?;
    let seccomp = needs
        .lines()
        .find_map(|line| line.trim().strip_prefix("libseccomp.so.2 => ")?.split(' ').next());
    copy(Path::new(seccomp.context("runc is not linked to libseccomp.so.2")?), target, false)
}

fn fresh(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

fn copy_all(from: &Path, to: &Path, strip: bool) -> Result<()> {
    for entry in fs::read_dir(from)? {
        copy(&entry?.path(), to, strip)?;
    }
    Ok(())
}

fn copy(file: &Path, folder: &Path, strip: bool) -> Result<()> {
    fs::create_dir_all(folder)?;
    let target = folder.join(file.file_name().context("the path has no file name")?);
    fs::copy(file, &target).with_context(|| format!("cannot copy {}", file.display()))?;
    if strip {
        sh::run(Command::new("strip").arg(&target))?;
    }
    Ok(())
}
