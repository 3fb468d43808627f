//! Namespace and name of a container that a container engine creates without containerd.

use serde_json::Value;

use crate::docker::is_name;
use crate::spec::annotation;

/// Annotation with the name of the container engine, which Podman and CRI-O set.
const MANAGER: &str = "io.container.manager";
/// Namespaces of containers without containerd. `oci` is the namespace for all container engines
/// other than Podman and CRI-O.
pub const NAMESPACES: [&str; 3] = ["podman", "cri-o", "oci"];
const MONITOR: &str = "conmon";

/// The namespace of a container with this spec.
#[must_use]
pub fn namespace(spec: &Value) -> &'static str {
    let [podman, crio, other] = NAMESPACES;
    match annotation(spec, MANAGER) {
        Some("libpod") => podman,
        Some("cri-o") => crio,
        _ => other,
    }
}

/// Returns the name that Podman or CRI-O gave the container, from the command line of the process
/// `parent`. Returns `None` if that process is not conmon.
#[must_use]
pub fn given(parent: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{parent}/cmdline")).ok()?;
    named(&String::from_utf8_lossy(&line))
}

/// Whether a process is conmon or a descendant of a conmon. conmon (the monitor of a container)
/// adopts the processes that its descendants leave behind, and waits for their end.
#[must_use]
pub fn is_below_monitor(mut pid: u32) -> bool {
    while pid > 1 {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        let Some((head, fields)) = stat.rsplit_once(')') else { return false };
        if head.split_once('(').is_some_and(|(_, name)| name.starts_with(MONITOR)) {
            return true;
        }
        let parent = fields.split_whitespace().nth(1).and_then(|parent| parent.parse().ok());
        pid = parent.unwrap_or(0);
    }
    false
}

/// Reads the name from a command line of conmon. A zero byte ends each argument.
fn named(line: &str) -> Option<String> {
    let mut words = line.split('\0');
    let program = words.next()?.rsplit('/').next()?;
    if !program.starts_with(MONITOR) {
        return None;
    }
    while let Some(word) = words.next() {
        let name = match word {
            "-n" | "--name" => words.next()?,
            _ => match word.strip_prefix("--name=") {
                Some(name) => name,
                None => continue,
            },
        };
        return is_name(name).then(|| name.to_owned());
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn engine_names_itself() {
        let of = |manager: &str| namespace(&json!({"annotations": {MANAGER: manager}}));
        assert_eq!((of("libpod"), of("cri-o"), of("x")), ("podman", "cri-o", "oci"));
        assert_eq!(namespace(&json!({})), "oci");
    }

    #[test]
    fn name_is_that_of_conmon() {
        let said = |line: &str| named(&line.replace(' ', "\0"));
        let line = "/usr/bin/conmon --api-version 1 -c 94f -u 94f -r /r -n trainer --exit-dir /e";
        assert_eq!(said(line).as_deref(), Some("trainer"));
        assert_eq!(said("conmon --name=a.b-1").as_deref(), Some("a.b-1"));
        assert_eq!(said("conmon -c 94f -n"), None);
        assert_eq!(said("conmon -n /etc"), None);
        assert_eq!(said("podman -n trainer"), None);
        assert_eq!(given(std::process::id()), None);
    }

    #[test]
    fn this_test_is_below_no_conmon() {
        assert!(!is_below_monitor(std::process::id()));
    }
}
