//! Checks of the programs that containerd starts: Affinode's shim, the stock shim that it runs, and
//! runc.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{CheckGroup, DoctorCheck, containerd::ContainerdProcess, on_path};

/// File name of Affinode's shim.
pub const SHIM: &str = "containerd-shim-affinode-v1";
/// File name of the stock shim.
const STOCK: &str = "containerd-shim-runc-v2";
/// Environment variable by which an operator sets another path of the stock shim.
const STOCK_ENV: &str = "AFFINODE_STOCK_SHIM";

/// Values that the checks of the programs examine.
#[derive(Clone, Debug, Default)]
pub struct ProgramFacts {
    /// Path of Affinode's shim, and the version that it prints.
    pub shim: Option<(PathBuf, Result<String, String>)>,
    /// Path of the stock shim.
    pub stock: Option<PathBuf>,
    /// Path of runc or crun.
    pub runc: Option<PathBuf>,
}

impl ProgramFacts {
    /// Searches for the programs on containerd's PATH. The stock shim may also be in the folder of
    /// containerd or of Affinode's shim.
    #[must_use]
    pub fn gather(daemon: &ContainerdProcess) -> ProgramFacts {
        let path = daemon.path();
        let beside = daemon.program.parent().map(Path::to_owned);
        let find = |program: &str| on_path(path.iter().cloned(), program);
        let shim = find(SHIM).map(|shim| {
            let version = version(&shim);
            (shim, version)
        });
        let ours = shim.as_ref().and_then(|(shim, _)| shim.parent()).map(Path::to_owned);
        let named = daemon.variable(STOCK_ENV).map(PathBuf::from);
        let stock = || on_path(path.iter().cloned().chain(beside).chain(ours), STOCK);
        // The stock shim starts runc and inherits the same PATH.
        ProgramFacts {
            stock: named.or_else(stock),
            runc: find("runc").or_else(|| find("crun")),
            shim,
        }
    }
}

fn version(shim: &Path) -> Result<String, String> {
    let output = Command::new(shim).arg("-v").stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Version:"))
        .map(|version| version.trim().to_owned())
        .ok_or_else(|| {
            format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
        })
}

/// Returns the checks of Affinode's shim, the stock shim and runc.
#[must_use]
pub fn judge(facts: &ProgramFacts) -> Vec<DoctorCheck> {
    let own = env!("CARGO_PKG_VERSION");
    let mut group = CheckGroup::new("programs");
    match &facts.shim {
        None => {
            let hint = "run affinode install, or copy the shim into a folder of containerd's PATH, often /usr/local/bin";
            group.bad("shim", format!("{SHIM} is not in containerd's PATH"), hint);
        }
        Some((path, Ok(version))) if version == own => {
            group.good("shim", format!("{}, {version}", path.display()));
        }
        Some((path, Ok(version))) => {
            let found = format!(
                "{} has version {version}, but this command has version {own}",
                path.display()
            );
            group.bad("shim", found, "install the shim and affinode from the same release");
        }
        Some((path, Err(why))) => {
            let hint = "install the shim again, from a release for this machine's architecture";
            group.bad(
                "shim",
                format!("{} does not print its version: {why}", path.display()),
                hint,
            );
        }
    }
    match &facts.stock {
        Some(path) if super::is_program(path) => {
            group.good("stock shim", path.display().to_string())
        }
        _ => group.bad(
            "stock shim",
            format!("{STOCK} is neither in containerd's PATH nor in containerd's folder"),
            format!("install containerd's package, or set {STOCK_ENV} to its path"),
        ),
    }
    match &facts.runc {
        Some(path) => group.good("runc", path.display().to_string()),
        None => group.warning(
            "runc",
            "neither runc nor crun is in containerd's PATH",
            "install runc, unless options.BinaryName of the handlers is another runtime",
        ),
    }
    group.checks
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::{super::CheckVerdict, *};

    fn verdicts(shim: Option<(PathBuf, Result<String, String>)>) -> Vec<CheckVerdict> {
        let facts = ProgramFacts { shim, stock: Some("/bin/sh".into()), runc: None };
        judge(&facts).iter().map(|check| check.verdict).collect()
    }

    #[test]
    fn a_shim_of_another_version_fails() {
        use CheckVerdict::{Bad, Good, Warning};
        let shim = |version: &str| Some(("/bin/x".into(), Ok(version.into())));
        assert_eq!(verdicts(shim(env!("CARGO_PKG_VERSION"))), [Good, Good, Warning]);
        assert_eq!(verdicts(shim("0.0.1"))[0], Bad);
        assert_eq!(verdicts(Some(("/bin/x".into(), Err("exit 1".into()))))[0], Bad);
        assert_eq!(verdicts(None)[0], Bad);
        assert_eq!(judge(&ProgramFacts::default())[1].verdict, Bad);
    }

    #[test]
    fn the_version_is_what_the_program_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SHIM);
        std::fs::write(&path, "#!/bin/sh\nprintf 'shim:\\n  Version:  9.9\\n'\n").unwrap();
        assert!(!super::super::is_program(&path));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(version(&path).unwrap(), "9.9");
        assert!(version(Path::new("/bin/false")).is_err());
    }
}
