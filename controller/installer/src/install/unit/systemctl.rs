//! Runs systemctl for the controller's unit.

use std::process::{Command, Stdio};

use affinode_controller::error_chain;

use super::{UNIT, UnitError};

/// Number of restarts from which on a unit that is starting counts as failing.
const FAILED_STARTS: u32 = 3;

/// State of the controller's unit, as systemd reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitActivity {
    /// Whether the unit runs or is starting.
    pub active: bool,
    /// Whether systemd starts the unit at boot.
    pub enabled: bool,
    /// Whether the unit fails at each start, so that systemd starts it again and again.
    pub failing: bool,
    /// Pid of the unit's main process. `None`: no process runs.
    pub main_pid: Option<u32>,
}

/// Runs systemctl with these arguments, and returns its output.
pub fn run(arguments: &[&str]) -> Result<String, UnitError> {
    let failed = |why| UnitError::Systemctl { what: arguments.join(" "), why };
    let output = Command::new("systemctl").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(error_chain::chain(&error)))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Queries systemd for the state of the controller's unit.
pub fn activity() -> Result<UnitActivity, UnitError> {
    let properties = "--property=ActiveState,UnitFileState,MainPID,NRestarts";
    run(&["show", properties, UNIT]).map(|said| parse(&said))
}

fn parse(said: &str) -> UnitActivity {
    let value = |name: &str| {
        let mut values = said.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next().unwrap_or_default()
    };
    UnitActivity {
        // A unit whose process has ended is "activating" until systemd starts it again.
        active: matches!(value("ActiveState"), "active" | "activating" | "reloading"),
        // A unit that a crash or a new program has restarted once is "activating" only for a
        // moment.
        failing: value("ActiveState") == "activating"
            && value("NRestarts").parse::<u32>().is_ok_and(|count| count >= FAILED_STARTS),
        enabled: value("UnitFileState").starts_with("enabled"),
        main_pid: value("MainPID").parse().ok().filter(|pid| *pid != 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_found_by_name() {
        let said = "MainPID=41\nActiveState=activating\nUnitFileState=enabled-runtime\n";
        let running =
            UnitActivity { active: true, failing: false, enabled: true, main_pid: Some(41) };
        assert_eq!(parse(said), running);
        let failing = |said: &str| parse(said).failing;
        assert!(failing("ActiveState=activating\nNRestarts=9\n"));
        assert!(!failing("ActiveState=activating\nNRestarts=1\n"), "one crash");
        assert!(!failing("ActiveState=active\nNRestarts=9\n"), "it runs again");
        let stopped = "MainPID=0\nActiveState=failed\nUnitFileState=disabled\n";
        assert_eq!(parse(stopped), UnitActivity::default());
    }
}
