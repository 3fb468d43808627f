//! The part of an installation for Podman: the program `affinode-runtime`, and a configuration
//! file. Podman reads the file's folder at each run, so nothing must be restarted.

use std::path::{Path, PathBuf};

use super::{FileError, InstallOptions, files, host_process::HostProcess, record::InstallRecord};
use crate::doctor::is_on_path;

/// Folder from which Podman reads files of the machine's administrator.
pub const FOLDER: &str = "/etc/containers/containers.conf.d";
/// Name of Affinode's configuration file for Podman.
const FILE: &str = "affinode.conf";
/// Name of the runtime program that Podman runs.
pub const RUNTIME: &str = "affinode-runtime";
/// Podman's configuration file for an installation with default values. For other values, the texts
/// [`INSTALLED`], [`LISTED`] and [`NAMED`] in it are replaced.
const TEXT: &str = include_str!("../../../../config/podman/affinode.conf");
const INSTALLED: &str = "/usr/local/bin/affinode-runtime";
const LISTED: &str = "\"affinode\"]";
const NAMED: &str = "\naffinode = ";
/// Name of the monitor process that Podman and CRI-O start for each container. Its option `-r`
/// contains the path of the runtime.
const MONITOR: &str = "conmon";

/// Whether an installation registers the runtime in Podman.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodmanRequest {
    /// Podman is included if it is installed on this machine.
    Detected,
    /// Podman must be included. Affinode's configuration file is written into this folder.
    Required(PathBuf),
    /// Podman's configuration is not changed.
    Never,
}

/// A file for Podman's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodmanFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Content of the file.
    pub text: String,
}

/// The change that an installation makes for Podman.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodmanPlan {
    /// Podman's configuration is not changed.
    LeftOut,
    /// The program and this configuration file are installed. `None`: only the program is
    /// installed, because a file that a user wrote or changed exists at the path.
    Register(Option<PodmanFile>),
}

impl PodmanPlan {
    /// Plans Podman's part of an installation.
    ///
    /// # Errors
    /// [`FileError`]: a file cannot be read.
    pub fn of(
        options: &InstallOptions,
        older: Option<&InstallRecord>,
    ) -> Result<PodmanPlan, FileError> {
        let recorded = older.and_then(recorded);
        let folder = match (&options.podman, &recorded) {
            (PodmanRequest::Never, _) => return Ok(PodmanPlan::LeftOut),
            (PodmanRequest::Required(folder), _) => folder.clone(),
            (PodmanRequest::Detected, Some((path, _))) => {
                path.parent().unwrap_or(Path::new("/")).to_owned()
            }
            (PodmanRequest::Detected, None) if is_on_path("podman") => FOLDER.into(),
            (PodmanRequest::Detected, None) => return Ok(PodmanPlan::LeftOut),
        };
        let path = folder.join(FILE);
        let known = recorded.filter(|(known, _)| *known == path).map(|(_, sha256)| sha256);
        // A file that a user wrote or changed stays as it is.
        let ours = match path.exists() {
            false => true,
            true => known.is_some_and(|sha256| files::digest(&path).is_ok_and(|now| now == sha256)),
        };
        let text = text(&options.prefix, &options.runtime_name);
        Ok(PodmanPlan::Register(ours.then_some(PodmanFile { path, text })))
    }
}

/// Returns the recorded path of Podman's configuration file, and the digest of its content.
fn recorded(record: &InstallRecord) -> Option<(PathBuf, String)> {
    let mut listed = record.listed();
    let (path, sha256) = listed.find(|(path, _)| path.ends_with(FILE))?;
    Some((path.to_owned(), sha256.to_owned()))
}

/// Returns whether the recorded installation includes Podman.
pub fn is_recorded(record: &InstallRecord) -> bool {
    record.listed().any(|(path, _)| path.ends_with(RUNTIME))
}

fn text(prefix: &Path, name: &str) -> String {
    let program = prefix.join("bin").join(RUNTIME);
    TEXT.replace(INSTALLED, &program.display().to_string())
        .replace(LISTED, &format!("\"{name}\"]"))
        .replace(NAMED, &format!("\n{name} = "))
}

/// Counts the containers of Podman and CRI-O that run with the installed program, and the commands
/// that run in these containers. Without the program, they could not be ended. Containers of
/// rootless Podman do not count, because any user could then prevent an uninstallation.
pub fn running(prefix: &Path) -> usize {
    let programs = files::places_of_program(prefix, RUNTIME);
    let is_one = |process: &HostProcess| {
        let argv = process.command_line();
        programs.iter().any(|program| is_monitor(&argv, program))
    };
    HostProcess::all().filter(is_one).count()
}

fn is_monitor(argv: &[u8], program: &Path) -> bool {
    let words: Vec<&[u8]> = argv.split(|byte| *byte == 0).collect();
    let name = words.first().and_then(|first| first.rsplit(|byte| *byte == b'/').next());
    let program = program.as_os_str().as_encoded_bytes();
    name == Some(MONITOR.as_bytes()) && words.windows(2).any(|pair| pair == [b"-r", program])
}

/// Returns whether a program named `containerd` is on the PATH. The program need not run.
pub fn has_containerd() -> bool {
    is_on_path("containerd")
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        os::unix::process::CommandExt,
        process::{Command, Stdio},
    };

    use super::*;
    use affinode_proto::installation::PathsFile;

    #[test]
    fn file_names_the_installed_program() {
        assert_eq!(text(Path::new("/usr/local"), "affinode"), TEXT);
        let other: toml::Table = text(Path::new("/opt/a"), "gpu-idle").parse().unwrap();
        let engine = &other["engine"];
        assert_eq!(engine["runtimes"]["gpu-idle"][0].as_str(), Some("/opt/a/bin/affinode-runtime"));
        let named = engine["runtime_supports_json"].as_array().unwrap();
        assert!(named.iter().any(|name| name.as_str() == Some("gpu-idle")));
        assert!(!named.iter().any(|name| name.as_str() == Some("affinode")));
    }

    #[test]
    fn only_monitors_of_the_program_count() {
        let program = Path::new("/usr/local/bin/affinode-runtime");
        let counts = |line: &str| is_monitor(line.replace(' ', "\0").as_bytes(), program);
        assert!(counts("/usr/bin/conmon -c 94f -r /usr/local/bin/affinode-runtime -n trainer"));
        // CRI-O's order of the options.
        assert!(counts("/usr/bin/conmon -b /b -r /usr/local/bin/affinode-runtime --syslog -u 94f"));
        assert!(!counts("/usr/bin/conmon -c 94f -r /usr/bin/crun -n trainer"));
        assert!(!counts("/usr/bin/podman -r /usr/local/bin/affinode-runtime"));
        assert!(!counts(""));
    }

    /// Podman may name the program by its path with links resolved.
    #[test]
    fn a_monitor_below_a_linked_prefix_counts() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("usrlocal/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let prefix = root.path().join("local");
        std::os::unix::fs::symlink("usrlocal", &prefix).unwrap();
        let named = [prefix.join("bin"), bin].map(|bin| bin.join(RUNTIME));
        for program in named {
            let mut monitor = Command::new("sh");
            monitor.arg0(MONITOR).args(["-c", "echo; read line", "-r"]).arg(&program);
            let mut monitor = monitor.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // A process has no command line at the moment at which it is started.
            monitor.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let found = running(&prefix);
            monitor.kill().unwrap();
            monitor.wait().unwrap();
            assert_eq!(found, 1, "{}", program.display());
        }
    }

    fn options(podman: PodmanRequest) -> InstallOptions {
        InstallOptions {
            containerd: None,
            prefix: "/usr/local".into(),
            state_dir: "/var/lib/affinode".into(),
            folders: PathsFile::default(),
            runtime_name: "affinode".into(),
            restart: super::super::RestartRequest::None,
            docker: super::super::DockerRequest::Never,
            unit: super::super::UnitRequest::Never,
            podman,
            drain: std::time::Duration::ZERO,
            dry_run: true,
        }
    }

    #[test]
    fn file_of_a_user_stays() {
        let folder = tempfile::tempdir().unwrap();
        let request = PodmanRequest::Required(folder.path().to_owned());
        let plan = PodmanPlan::of(&options(request.clone()), None).unwrap();
        let path = folder.path().join(FILE);
        let file = PodmanFile { path: path.clone(), text: TEXT.to_owned() };
        assert_eq!(plan, PodmanPlan::Register(Some(file)));
        std::fs::write(path, "[engine]\n").unwrap();
        assert_eq!(PodmanPlan::of(&options(request), None).unwrap(), PodmanPlan::Register(None));
        let never = PodmanPlan::of(&options(PodmanRequest::Never), None).unwrap();
        assert_eq!(never, PodmanPlan::LeftOut);
    }
}
