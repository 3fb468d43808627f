//! Executes the core's orders about the VRAM limits that the driver enforces for cgroups (driver
//! 615 or newer).
//!
//! A file in the container's folder names the cgroup whose limit was set. So a controller that
//! starts later knows that it must remove the limit. It removes no limit that others have set.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use affinode_core::{
    DeviceBytes, Key,
    driver_limit::{DriverLimit, DriverLimitOrder, DriverLimitOutcome},
};
use affinode_proto::paths;

use super::{
    nvml::{MemoryLimitError, NvmlDevices},
    own_cgroup::{self, OwnCgroupError},
};
use crate::error_chain;

/// Name of the file with the path of the limited cgroup, in the folder of the container. The
/// container cannot reach it.
const MARKER: &str = ".driver-limit";

/// Reason why an order cannot be executed.
#[derive(Debug, thiserror::Error)]
enum LimitError {
    #[error(transparent)]
    Cgroup(#[from] OwnCgroupError),
    #[error(transparent)]
    Nvml(#[from] MemoryLimitError),
    #[error("cannot write {path}")]
    Marker {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Executes orders, and remembers what the log contains already.
#[derive(Debug)]
pub struct DriverLimits {
    containers: PathBuf,
    /// The last failure of each container that was logged.
    told: BTreeMap<Key, String>,
    told_too_old: bool,
}

impl DriverLimits {
    /// Creates the executor for the controller with this run directory.
    #[must_use]
    pub fn new(run_dir: &Path) -> DriverLimits {
        let containers = run_dir.join(paths::CONTAINERS_DIR);
        DriverLimits { containers, told: BTreeMap::new(), told_too_old: false }
    }

    /// Executes an order. Logs each failure once for each container, and a driver without such
    /// limits once.
    pub fn execute(
        &mut self,
        nvml: &mut NvmlDevices,
        order: &DriverLimitOrder,
    ) -> DriverLimitOutcome {
        let key = &order.key;
        match apply(&self.containers, nvml, order) {
            Ok(()) => {
                self.told.remove(key);
                DriverLimitOutcome::Done
            }
            Err(LimitError::Nvml(MemoryLimitError::TooOld)) => {
                if !std::mem::replace(&mut self.told_too_old, true) {
                    tracing::info!(
                        "VRAM limits: enforced by the library alone, because the driver has no \
                         limits of its own (driver 615 and newer have)"
                    );
                }
                DriverLimitOutcome::TooOld
            }
            Err(error) => {
                let why = error_chain::chain(&error);
                if self.told.insert(key.clone(), why.clone()).as_ref() != Some(&why) {
                    tracing::warn!(
                        %key,
                        "container {key}: the driver's own VRAM limit cannot be changed: {why}"
                    );
                }
                DriverLimitOutcome::Failed(why)
            }
        }
    }
}

fn apply(
    containers: &Path,
    nvml: &mut NvmlDevices,
    order: &DriverLimitOrder,
) -> Result<(), LimitError> {
    let marker = containers.join(order.key.as_str()).join(MARKER);
    // The end of a cgroup removes its limits.
    let limited =
        fs::read(&marker).ok().map(|path| PathBuf::from(std::ffi::OsString::from_vec(path)));
    let limited = limited.filter(|cgroup| cgroup.is_dir());
    let DriverLimit::Set(bytes) = order.limit else {
        let Some(cgroup) = limited else { return Ok(()) };
        set(nvml, &cgroup, &order.gpus, None)?;
        if order.limit == DriverLimit::Removed {
            let _ = fs::remove_file(&marker);
        }
        return Ok(());
    };
    nvml.check_memory_limits()?;
    let cgroup = match (limited, order.process) {
        (Some(cgroup), _) => cgroup,
        (None, Some(process)) => own_cgroup::find(process, &order.cgroups_path)?,
        (None, None) => return Ok(()),
    };
    fs::write(&marker, cgroup.as_os_str().as_bytes())
        .map_err(|source| LimitError::Marker { path: marker, source })?;
    set(nvml, &cgroup, &order.gpus, Some(bytes))
}

/// Sets the limit of a cgroup on each GPU. A GPU that is not larger than the limit needs none.
fn set(
    nvml: &mut NvmlDevices,
    cgroup: &Path,
    gpus: &[DeviceBytes],
    bytes: Option<u64>,
) -> Result<(), LimitError> {
    // A path of the kernel contains no zero byte.
    let cgroup = CString::new(cgroup.as_os_str().as_bytes()).unwrap_or_default();
    for gpu in gpus {
        nvml.limit_memory(&gpu.uuid, &cgroup, bytes.filter(|bytes| *bytes < gpu.bytes))?;
    }
    Ok(())
}
