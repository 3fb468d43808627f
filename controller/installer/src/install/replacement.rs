//! Replaces running controllers of an earlier version by a controller of the newly installed
//! version.
//!
//! The systemd unit is started before the earlier controller is ended. The unit's controller waits
//! for the lock of the earlier controller and takes over as soon as that controller ends. Therefore
//! no shim starts a controller in between.

use affinode_controller::inventory::process;
use affinode_core::input::Identity;
use affinode_proto::installation::PathsFile;

use super::{
    InstallError, InstallOptions, Steps, containerd,
    files::FileChange,
    unit::{UnitError, UnitPlan},
};
use crate::doctor::programs::SHIM;

/// The plan to replace running controllers of an earlier version. It is executed after the
/// installation has written its files.
pub struct ControllerReplacement {
    unit: UnitPlan,
    /// Controllers of the earlier version that run outside the systemd unit. A restart of the unit
    /// does not end them.
    old: Vec<Identity>,
}

impl ControllerReplacement {
    /// Plans which controllers must be replaced after these changes of the installed files.
    ///
    /// # Errors
    /// [`UnitError`]: the unit cannot be written.
    pub fn of(options: &InstallOptions, changes: &[FileChange]) -> Result<Self, UnitError> {
        let is_shim = |change: &FileChange| change.replaces() && change.to().ends_with(SHIM);
        // A controller reads `paths.conf` only at its start, so a change of that file also requires
        // a new controller.
        let folders = PathsFile::path(&options.prefix);
        let is_moved = changes.iter().any(|change| change.to() == folders);
        let new_program = is_moved || changes.iter().any(is_shim);
        let unit = UnitPlan::of(options, new_program)?;
        let mut old = containerd::old_controllers(&options.prefix, new_program);
        old.retain(|controller| Some(controller.pid) != unit.main_pid());
        Ok(ControllerReplacement { unit, old })
    }

    /// Returns descriptions of the steps, one per line.
    pub fn steps(&self) -> Steps {
        let mut steps = self.unit.steps();
        let next = match self.unit.keeps_controller() {
            true => "the systemd unit starts the new controller",
            false => "a shim starts the new controller",
        };
        steps.extend(self.old.iter().map(|controller| {
            let pid = controller.pid;
            format!("end the controller of the earlier version (process {pid}); then {next}")
        }));
        steps
    }

    /// Replaces the controllers after a later step of the installation has failed, if programs of
    /// the new version are already in place. New shims then do not meet a controller of the earlier
    /// version.
    pub fn make_after_failure(&self, options: &InstallOptions, changes: &[FileChange]) {
        if changes.iter().any(FileChange::is_made) {
            // The installation reports the first error. The next one plans this step again.
            let _ = self.make(options);
        }
    }

    /// Starts or restarts the unit, and ends the controllers of the earlier version.
    ///
    /// # Errors
    /// [`InstallError::Unit`]: the unit was not installed or started, but the rest of the
    /// installation is in place.
    pub fn make(&self, options: &InstallOptions) -> Result<(), InstallError> {
        let made = self.unit.make(&options.state_dir);
        for controller in &self.old {
            // A controller that cannot be ended continues to run, and `affinode doctor` reports it.
            let _ = process::end(controller, false);
        }
        made.map_err(|error| UnitError::NotStarted(Box::new(error)).into())
    }
}
