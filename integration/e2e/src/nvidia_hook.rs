//! Scripts in place of NVIDIA's programs that add the driver to a container: the prestart hook of
//! `docker run --gpus`, and `nvidia-container-cli`, which is the hook of `ctr run --gpus`.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Name of the program that dockerd looks for at its start.
const HOOK: &str = "nvidia-container-runtime-hook";
/// Name of the program that `ctr` looks for.
const CLI: &str = "nvidia-container-cli";
/// The hook's search for process and root filesystem of the container.
const BY_STATE: &str = r#"state=$(cat)
field() { echo "$state" | sed "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/"; }
pid=$(field pid) bundle=$(field bundle)
root=$(sed 's/.*"root":{"path":"\([^"]*\)".*/\1/' "$bundle/config.json")
"#;
/// The same for the command, whose last argument is the root filesystem.
const BY_ARGUMENTS: &str = r#"for word; do
    case $word in --pid=*) pid=${word#--pid=} ;; esac
    root=$word
done
"#;
/// Mounts files and folders into the root filesystem, in the container's mount namespace. The
/// container's own mounts exist then.
const MOUNT: &str = r#"export root
nsenter --mount="/proc/$pid/ns/mnt" sh -e -c 'while read -r host inside; do
    if [ -d "$host" ]; then mkdir -p "$root$inside"
    else mkdir -p "$root${inside%/*}"; : > "$root$inside"; fi
    mount --bind "$host" "$root$inside"
done' < @DIR@/hook-mounts
echo "$1" > @DIR@/hook-ran
"#;

/// Writes the hook into `folder`. It mounts these paths of the host at paths of the container, and
/// notes its call in `notes`.
///
/// # Errors
/// When a file cannot be written.
pub fn place(folder: &Path, notes: &Path, mounts: &[(PathBuf, PathBuf)]) -> Result<()> {
    write(&folder.join(HOOK), BY_STATE, notes, mounts)
}

/// Like [`place`], for the command of `ctr run --gpus`.
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

/// The phase in which the hook last ran.
///
/// # Errors
/// When it has not run.
pub fn phase(notes: &Path) -> Result<String> {
    let ran = fs::read_to_string(notes.join("hook-ran")).context("NVIDIA's hook has not run")?;
    Ok(ran.trim().to_owned())
}
