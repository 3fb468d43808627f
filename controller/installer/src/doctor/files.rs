//! Checks of the run directory, the configuration and the controller.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use affinode_proto::paths;
use rustix::fs::StatVfsMountFlags;

use super::{CheckGroup, DoctorCheck};

/// Values that the checks of the run directory and the configuration examine.
#[derive(Clone, Debug)]
pub struct PathFacts {
    /// The run directory of this command.
    pub run_dir: PathBuf,
    /// The run directory that shims use.
    pub shims_run_dir: PathBuf,
    /// Owner and mode of the run directory, if it exists.
    pub owner_mode: Option<(u32, u32)>,
    /// Mode of the control socket, if it exists.
    pub socket_mode: Option<u32>,
    /// Whether the file system of the run directory is read-only. If the run directory does not
    /// exist, this refers to its nearest existing parent folder.
    pub read_only: bool,
    /// Path of the configuration file.
    pub config_file: PathBuf,
    /// Reason why the configuration is invalid. `None`: it is valid.
    pub config_error: Option<String>,
}

impl PathFacts {
    /// Collects the values for the checks of the run directory and the configuration on this
    /// machine.
    #[must_use]
    pub fn gather(
        run_dir: &Path,
        shims_run_dir: &Path,
        config_file: PathBuf,
        config_error: Option<String>,
    ) -> PathFacts {
        let there = run_dir.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("/"));
        let mode = |meta: &fs::Metadata| meta.permissions().mode() & 0o7777;
        let socket = fs::metadata(run_dir.join(paths::CONTROL_SOCKET));
        PathFacts {
            run_dir: run_dir.to_owned(),
            shims_run_dir: shims_run_dir.to_owned(),
            owner_mode: fs::metadata(run_dir).ok().map(|meta| (meta.uid(), mode(&meta))),
            socket_mode: socket.ok().map(|meta| mode(&meta)),
            read_only: rustix::fs::statvfs(there)
                .is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::RDONLY)),
            config_file,
            config_error,
        }
    }
}

/// Returns the checks of the run directory, the control socket and the configuration.
#[must_use]
pub fn judge(facts: &PathFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("installation");
    let path = facts.run_dir.display();
    if facts.run_dir != facts.shims_run_dir {
        group.warning(
            "run directory",
            format!(
                "this command uses {path}, but containerd's shims use {}",
                facts.shims_run_dir.display()
            ),
            format!("run this command with --run-dir {}", facts.shims_run_dir.display()),
        );
    }
    match (facts.read_only, facts.owner_mode) {
        (true, _) => group.bad(
            "run directory",
            format!("{path} is on a read-only file system"),
            format!("set {} in containerd's environment to another directory", paths::RUN_DIR_ENV),
        ),
        (false, Some((owner, mode))) if owner != 0 || mode & 0o022 != 0 => group.bad(
            "run directory",
            format!("{path} belongs to user {owner} and has mode {mode:o}, so other users could replace its files"),
            format!("chown root {path} && chmod 711 {path}"),
        ),
        (false, Some(_)) => group.good("run directory", path.to_string()),
        (false, None) => {
            group.good("run directory", format!("{path} will be created with the first container"));
        }
    }
    if let Some(mode) = facts.socket_mode.filter(|mode| mode & 0o077 != 0) {
        let socket = facts.run_dir.join(paths::CONTROL_SOCKET);
        let hint = format!("chmod 600 {}", socket.display());
        group.bad(
            "control socket",
            format!(
                "the socket has mode {mode:o}, so other users can offload and restore containers"
            ),
            hint,
        );
    }
    let file = facts.config_file.display();
    match &facts.config_error {
        Some(why) => {
            let hint = "correct the key that the error names: a controller does not start with this configuration";
            group.bad("configuration", why.clone(), hint);
        }
        None if facts.config_file.exists() => {
            group.good("configuration", format!("{file} is valid"))
        }
        None => {
            group.good("configuration", format!("{file} does not exist, so the defaults apply"))
        }
    }
    group.checks
}

/// Returns the check of the running controller. `said` contains the controller's pid and version.
/// `None`: no controller listens. `Err`: its response is invalid or missing.
#[must_use]
pub fn controller(said: &Result<Option<(u32, String)>, String>) -> DoctorCheck {
    let own = env!("CARGO_PKG_VERSION");
    let mut group = CheckGroup::new("installation");
    let name = "controller";
    match said {
        Ok(Some((pid, version))) if version == own => {
            group.good(name, format!("process {pid}, {version}"));
        }
        Ok(Some((pid, version))) => group.warning(
            name,
            format!("process {pid} has version {version}, but this command has version {own}"),
            format!("run kill {pid}. A shim then starts the installed version within a second, and containers are not affected"),
        ),
        Ok(None) => group.good(name, "no controller runs: the first GPU container starts it"),
        Err(why) => {
            let hint = "see controller.log in the run directory, or the journal if systemd runs the controller";
            group.bad(name, format!("cannot connect to the controller: {why}"), hint);
        }
    }
    group.checks.remove(0)
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    fn good() -> PathFacts {
        PathFacts {
            run_dir: "/run/affinode".into(),
            shims_run_dir: "/run/affinode".into(),
            owner_mode: Some((0, 0o711)),
            socket_mode: Some(0o600),
            read_only: false,
            config_file: "/nonexistent/config.toml".into(),
            config_error: None,
        }
    }

    fn named(facts: &PathFacts, name: &str) -> Vec<CheckVerdict> {
        judge(facts).iter().filter(|check| check.name == name).map(|c| c.verdict).collect()
    }

    #[test]
    fn a_writable_run_directory_fails() {
        use CheckVerdict::{Bad, Good, Warning};
        assert!(judge(&good()).iter().all(|check| check.verdict == Good));
        for owner_mode in [Some((1000, 0o711)), Some((0, 0o777))] {
            assert_eq!(named(&PathFacts { owner_mode, ..good() }, "run directory"), [Bad]);
        }
        let open = PathFacts { socket_mode: Some(0o666), ..good() };
        assert_eq!(named(&open, "control socket"), [Bad]);
        assert_eq!(named(&PathFacts { read_only: true, ..good() }, "run directory"), [Bad]);
        let other = PathFacts { shims_run_dir: "/elsewhere".into(), ..good() };
        assert_eq!(named(&other, "run directory"), [Warning, Good]);
        let bad = PathFacts { config_error: Some("mode".into()), ..good() };
        assert_eq!(named(&bad, "configuration"), [Bad]);
    }

    #[test]
    fn a_silent_controller_fails() {
        let own = env!("CARGO_PKG_VERSION").to_owned();
        assert_eq!(controller(&Ok(Some((7, own)))).verdict, CheckVerdict::Good);
        assert_eq!(controller(&Ok(Some((7, "0.0.1".into())))).verdict, CheckVerdict::Warning);
        assert_eq!(controller(&Ok(None)).verdict, CheckVerdict::Good);
        assert_eq!(controller(&Err("late".into())).verdict, CheckVerdict::Bad);
    }
}
