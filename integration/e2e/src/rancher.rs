//! Simulates those parts of k3s and rke2 that matter to an installation of Affinode: how they
//! configure, start and stop containerd. The simulation follows their source code. The programs k3s
//! and rke2 do not run here.
//!
//! ```text
//! start: the user's template, or the built-in one ──> config.toml ──> containerd -c config.toml …, in the unit's cgroup
//! stop:  k3s or rke2 ends, and the kernel kills containerd ──> rke2 kills what is left of containerd in the unit's cgroup
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{image, release::Line, supervisor::cgroup_parent};

/// Name of the systemd unit. The installer of k3s lets the user choose this name.
pub const UNIT: &str = "k3s-lab";
/// Folder of containerd's configuration, relative to the data folder of k3s or rke2.
const FOLDER: &str = "agent/etc/containerd";
const BASE: &str = "{{ template \"base\" . }}";
/// Names of the configuration templates that a user may write, and the configuration version of
/// each. k3s and rke2 read the first template that exists.
const TEMPLATES: [(&str, u8); 2] = [("config-v3.toml.tmpl", 3), ("config.toml.tmpl", 2)];
/// Name of the program whose presence tells k3s and rke2 that NVIDIA's runtime is installed. In
/// this simulation the program is runc.
const NVIDIA: &str = "nvidia-container-runtime";

/// A simulated k3s or rke2 in a testbed.
pub struct Rancher<'a> {
    /// Release line of the containerd that k3s or rke2 runs.
    pub line: Line,
    /// Whether containerd's configuration file imports the files of a folder next to it. For
    /// containerd 2, newer versions of k3s and rke2 write a file with such an import.
    pub imports: bool,
    /// Folder of the testbed.
    pub dir: &'a Path,
    /// Folder with containerd's images and snapshots.
    pub store: &'a Path,
}

impl Rancher<'_> {
    fn folder(&self) -> PathBuf {
        self.dir.join(FOLDER)
    }

    /// Path of the configuration file that k3s or rke2 writes for containerd.
    pub fn config_file(&self) -> PathBuf {
        self.folder().join("config.toml")
    }

    /// Creates the files that exist before the first start of k3s or rke2.
    pub fn prepare(&self) -> Result<()> {
        fs::create_dir_all(self.folder())?;
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let runc = std::env::split_paths(&folders)
            .chain(["/usr/sbin".into()])
            .map(|folder| folder.join("runc"))
            .find(|runc| runc.exists());
        Ok(std::os::unix::fs::symlink(runc.context("cannot find runc")?, self.dir.join(NVIDIA))?)
    }

    /// Writes containerd's configuration file, as k3s and rke2 do at each start.
    pub fn render(&self) -> Result<()> {
        // With containerd 1.x only the older template is read.
        let known = if self.line == Line::V2 { &TEMPLATES[..] } else { &TEMPLATES[1..] };
        let there = known.iter().find_map(|(name, version)| {
            Some((fs::read_to_string(self.folder().join(name)).ok()?, *version))
        });
        let (template, version) = there.unwrap_or_else(|| (BASE.into(), known[0].1));
        Ok(fs::write(self.config_file(), template.replace(BASE, &self.base(version)))?)
    }

    /// Returns the content of the built-in template, with all values filled in.
    fn base(&self, version: u8) -> String {
        let [dir, store, folder] =
            [self.dir, self.store, &self.folder()].map(|path| path.display().to_string());
        let imports = match (self.imports && self.line == Line::V2, version) {
            (false, _) => String::new(),
            (true, 2) => format!("imports = [\"{folder}/config.toml.d/*.toml\"]\n"),
            (true, _) => format!("imports = [\"{folder}/config-v3.toml.d/*.toml\"]\n"),
        };
        let cri = "io.containerd.grpc.v1.cri";
        let sandbox = image::PAUSE;
        // In configuration version 2, one table contains all settings of CRI.
        let (runtime, open, images) = match version {
            2 => (cri, format!("sandbox_image = \"{sandbox}\""), String::new()),
            _ => {
                let (runtime, images) =
                    ("io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images");
                let pinned =
                    format!("[plugins.'{images}'.pinned_images]\nsandbox = \"{sandbox}\"\n");
                (runtime, format!("[plugins.'{runtime}']"), pinned)
            }
        };
        format!(
            r#"# Written anew at each start.
version = {version}
{imports}root = "{store}/containerd"
state = "{dir}/state"
[grpc]
address = "{dir}/containerd.sock"
[debug]
level = "info"
[plugins.'io.containerd.internal.v1.opt']
path = "{store}/opt"
[plugins.'io.containerd.nri.v1.nri']
disable = true
[plugins.'{cri}']
stream_server_address = "127.0.0.1"
stream_server_port = "10010"
{open}
enable_selinux = false
enable_unprivileged_ports = true
enable_unprivileged_icmp = true
restrict_oom_score_adj = true
[plugins.'{runtime}'.cni]
bin_dir = "{dir}/cni/bin"
conf_dir = "{dir}/cni/net.d"
{images}[plugins.'{runtime}'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'{runtime}'.containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins.'{runtime}'.containerd.runtimes.'nvidia']
runtime_type = "io.containerd.runc.v2"
[plugins.'{runtime}'.containerd.runtimes.'nvidia'.options]
BinaryName = "{dir}/{NVIDIA}"
SystemdCgroup = false
"#
        )
    }

    /// Returns the command line with which k3s or rke2 starts containerd. containerd is found in
    /// PATH, and runs in the cgroup of the unit.
    pub fn argv(&self) -> Result<Vec<String>> {
        let unit = self.cgroup();
        fs::create_dir_all(&unit).with_context(|| format!("cannot make {}", unit.display()))?;
        let [procs, config] =
            [unit.join("cgroup.procs"), self.config_file()].map(|path| path.display().to_string());
        let [dir, store] = [self.dir, self.store].map(|path| path.display().to_string());
        let enter = "echo $$ > \"$0\" && exec \"$@\"";
        let mut argv =
            ["sh", "-c", enter, &procs, "containerd", "-c", &config].map(str::to_owned).to_vec();
        argv.extend(["-a".into(), format!("{dir}/containerd.sock")]);
        argv.extend(["--state".into(), format!("{dir}/state")]);
        argv.extend(["--root".into(), format!("{store}/containerd")]);
        Ok(argv)
    }

    fn cgroup(&self) -> PathBuf {
        let named = PathBuf::from("/sys/fs/cgroup/systemd");
        let root = if named.is_dir() { named } else { "/sys/fs/cgroup".into() };
        root.join(cgroup_parent(self.dir)).join(format!("{UNIT}.service"))
    }

    /// Requires that rke2 would kill no shim when the systemd unit of rke2 stops. After the stop,
    /// rke2 lists the processes in the unit's cgroup. It kills each process whose line has a
    /// process id before the word containerd or kubelet.
    pub fn stopped(&self) -> Result<()> {
        let pids = fs::read_to_string(self.cgroup().join("cgroup.procs"))?;
        for pid in pids.lines() {
            // A process that has ended since the listing is skipped.
            let Ok(raw) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
            let line = format!("{pid} {}", String::from_utf8_lossy(&raw).replace('\0', " "));
            if ["containerd", "kubelet"].iter().any(|word| is_listed(&line, word)) {
                bail!("rke2 would end a process that is not containerd: {line}");
            }
        }
        Ok(())
    }
}

/// Whether a line contains a digit, a blank and the word, in this order and next to each other.
fn is_listed(line: &str, word: &str) -> bool {
    let digit = |at: usize| line[..at].ends_with(|last: char| last.is_ascii_digit());
    line.match_indices(&format!(" {word}")).any(|(at, _)| digit(at))
}

#[cfg(test)]
mod tests {
    use super::is_listed;

    #[test]
    fn process_started_by_name_is_listed() {
        assert!(is_listed("7 containerd -c /a", "containerd"));
        assert!(is_listed("7 containerd-shim-x -id 1", "containerd"));
        assert!(!is_listed("7 /usr/bin/containerd-shim-x -id a containerd", "containerd"));
    }
}
