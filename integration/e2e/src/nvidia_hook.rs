//! Writes scripts that take the place of two NVIDIA programs. The programs of NVIDIA add the driver
//! to a container. One script is the prestart hook of `docker run --gpus`. The other is
//! `nvidia-container-cli`, which `ctr run --gpus` uses as its hook.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Name of the NVIDIA program that dockerd looks for at its start.
const HOOK: &str = "nvidia-container-runtime-hook";
/// Name of the NVIDIA program that `ctr` looks for.
const CLI: &str = "nvidia-container-cli";
/// Shell commands with which the prestart hook finds the container's process and root filesystem.
/// The hook gets the OCI state of the container on its standard input. The state contains the
/// process id and the path of the bundle.
const BY_STATE: &str = r#"state=$(cat)
field() { echo "$state" | sed "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/"; }
pid=$(field pid) bundle=$(field bundle)
root=$(sed 's/.*"root":{"path":"\([^"]*\)".*/\1/' "$bundle/config.json")
"#;
/// Shell commands with which `nvidia-container-cli` finds the container's process and root
/// filesystem in its own arguments. The last argument is the root filesystem.
const BY_ARGUMENTS: &str = r#"for word; do
    case $word in --pid=*) pid=${word#--pid=} ;; esac
    root=$word
done
"#;
/// Shell commands that mount files and folders into the root filesystem, in the container's mount
/// namespace. The container's own mounts already exist at that time.
const MOUNT: &str = r#"export root
nsenter --mount="/proc/$pid/ns/mnt" sh -e -c 'while read -r host inside; do
    if [ -d "$host" ]; then mkdir -p "$root$inside"
    else mkdir -p "$root${inside%/*}"; : > "$root$inside"; fi
    mount --bind "$host" "$root$inside"
done' < @DIR@/hook-mounts
echo "$1" > @DIR@/hook-ran
"#;

/// Writes the script that replaces NVIDIA's prestart hook into `folder`. The script mounts the
/// paths in `mounts` (host, container), and records its call in the folder `notes`.
///
/// # Errors
/// When a file cannot be written.
pub fn place(folder: &Path, notes: &Path, mounts: &[(PathBuf, PathBuf)]) -> Result<()> {
    write(&folder.join(HOOK), BY_STATE, notes, mounts)
}

/// Like [`place`], but writes a script that replaces `nvidia-container-cli`, which `ctr run --gpus`
/// calls.
///
/// # Errors
/// When a file cannot be written.
pub fn place_cli(folder: &Path, notes: &Path, mounts: &[(PathBuf, PathBuf)]) -> Result<()> {
    write(&folder.join(CLI), BY_ARGUMENTS, notes, mounts)
}

fn write(program: &Path, find: &str, notes: &Path, mounts: &[(PathBuf, PathBuf)]) -> Result<()> {
    let line =
        |(host, inside): &(PathBuf, PathBuf)| format!("{} {}\n", host.display(), inside.display());
    fs::write(notes.join("hook-mounts"), mounts.iter().map(line).collect::<String>())?;
    let script = format!("#!/bin/sh\nset -e\n{find}{MOUNT}");
    fs::create_dir_all(program.parent().context("the program's path has no folder")?)?;
    fs::write(program, script.replace("@DIR@", &notes.display().to_string()))?;
    Ok(fs::set_permissions(program, fs::Permissions::from_mode(0o755))?)
}

/// Returns the phase of the container's start in which the hook last ran.
///
/// # Errors
/// When the hook has not run.
pub fn phase(notes: &Path) -> Result<String> {
    let ran = fs::read_to_string(notes.join("hook-ran")).context("NVIDIA's hook has not run")?;
    Ok(ran.trim().to_owned())
}
