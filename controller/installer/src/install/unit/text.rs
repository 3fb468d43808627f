//! Creates the text of the controller's unit from the unit file in `config/systemd` and the paths
//! of this installation.

use std::path::Path;

use affinode_proto::paths;

/// Unit file of the repository. It contains the paths of an installation below /usr/local.
const TEMPLATE: &str = include_str!("../../../../../config/systemd/affinode-controller.service");
/// Folder of the programs, as it is written in the template.
const BIN: &str = "/usr/local/bin/";
/// Line of the template after which the environment variables of the installation are inserted.
const BEFORE_VARIABLES: &str = "Type=notify\n";
/// Environment variables that name the folders of an installation. If the environment of the
/// installer sets one of them, the unit sets it to the same value.
const VARIABLES: [&str; 3] = [paths::RUN_DIR_ENV, paths::LIB_DIR_ENV, paths::CONFIG_ENV];

/// Returns the text of the unit for the programs below `prefix`. The function `variable` returns
/// the value of an environment variable. `None`: a path contains characters with a special meaning
/// in a unit file.
pub fn of(prefix: &Path, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let bin = format!("{}/", prefix.join("bin").to_str().filter(|_| is_plain(prefix))?);
    let mut lines = String::from(BEFORE_VARIABLES);
    for name in VARIABLES {
        let Some(value) = variable(name) else { continue };
        if !is_plain(Path::new(&value)) {
            return None;
        }
        lines.push_str(&format!("Environment={name}={value}\n"));
    }
    Some(TEMPLATE.replace(BIN, &bin).replacen(BEFORE_VARIABLES, &lines, 1))
}

/// Returns whether a path contains no character with a special meaning in a unit file.
pub fn is_plain(path: &Path) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._+-".contains(&byte);
    path.is_absolute() && path.to_str().is_some_and(|text| text.bytes().all(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_folders_give_the_unit_of_config() {
        assert_eq!(of(Path::new("/usr/local"), |_| None).as_deref(), Some(TEMPLATE));
    }

    #[test]
    fn other_folders_are_in_the_unit() {
        let run_dir = |name: &str| (name == paths::RUN_DIR_ENV).then(|| "/run/lab".to_owned());
        let text = of(Path::new("/opt/lab"), run_dir).unwrap();
        let shim = "/opt/lab/bin/containerd-shim-affinode-v1";
        for line in [
            format!("ConditionFileIsExecutable={shim}"),
            format!("ExecStart={shim} controller"),
            format!("Environment={}=/run/lab", paths::RUN_DIR_ENV),
        ] {
            assert!(text.lines().any(|known| known == line), "{line} is not in {text}");
        }
        assert!(!text.contains(BIN), "{text}");
    }

    #[test]
    fn a_path_with_a_specifier_is_refused() {
        for path in ["/opt/%h", "/opt/a b", "/opt/$HOME", "opt", "/opt/\n"] {
            assert_eq!(of(Path::new(path), |_| None), None, "{path:?}");
            assert_eq!(of(Path::new("/opt"), |_| Some(path.into())), None, "{path:?}");
        }
    }
}
