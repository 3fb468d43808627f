//! Health of the driver's devices, as the kubelet shows it in the status of pods.
//!
//! A GPU is healthy while NVML can read it. A GPU that an earlier reading contained, and that NVML
//! can no longer read, is unhealthy. The kubelet forgets a report after [`REPORT_TIMEOUT`].

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::messages::{DeviceHealth, DeviceId, HEALTHY, HealthReport, UNHEALTHY};

/// Time after which the kubelet shows the health of a device as unknown, if no newer report has
/// arrived. It exceeds the interval between two readings of the GPUs several times.
const REPORT_TIMEOUT: Duration = Duration::from_secs(300);

/// Health of the devices that the driver has offered since the agent started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthRecord {
    /// Why each device is unhealthy, by the device's name. `None`: the device is healthy.
    devices: BTreeMap<String, Option<String>>,
    /// Time of the last reading of the GPUs, in seconds since 1970.
    read_at_seconds: i64,
}

impl HealthRecord {
    /// Records a reading of the GPUs at this time, in seconds since 1970. `readable` has the names
    /// of the devices that were read. Devices of earlier readings that it lacks are unhealthy,
    /// because of `why`.
    pub fn record(&mut self, readable: &BTreeSet<String>, why: &str, now_seconds: i64) {
        self.read_at_seconds = now_seconds;
        for (name, problem) in &mut self.devices {
            *problem = (!readable.contains(name)).then(|| why.to_owned());
        }
        for name in readable {
            self.devices.insert(name.clone(), None);
        }
    }

    /// Returns the report of all devices in this pool for the kubelet.
    #[must_use]
    pub fn report(&self, pool: &str) -> HealthReport {
        let device = |(name, problem): (&String, &Option<String>)| DeviceHealth {
            device: Some(DeviceId { pool_name: pool.into(), device_name: name.clone() }),
            health: if problem.is_some() { UNHEALTHY } else { HEALTHY },
            last_updated_seconds: self.read_at_seconds,
            timeout_seconds: REPORT_TIMEOUT.as_secs().cast_signed(),
            message: problem.clone().unwrap_or_default(),
        };
        HealthReport { devices: self.devices.iter().map(device).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn healths(record: &HealthRecord) -> Vec<(String, i32, String)> {
        let of = |one: DeviceHealth| (one.device.unwrap().device_name, one.health, one.message);
        record.report("node").devices.into_iter().map(of).collect()
    }

    #[test]
    fn device_that_cannot_be_read_is_unhealthy() {
        let mut record = HealthRecord::default();
        record.record(&names(&["a", "b"]), "", 5);
        let healthy = |name: &str| (name.to_owned(), HEALTHY, String::new());
        assert_eq!(healths(&record), [healthy("a"), healthy("b")]);
        record.record(&names(&["a"]), "GPU 1: lost", 65);
        let lost = ("b".to_owned(), UNHEALTHY, "GPU 1: lost".to_owned());
        assert_eq!(healths(&record), [healthy("a"), lost]);
        record.record(&names(&["a", "b"]), "", 125);
        assert_eq!(healths(&record), [healthy("a"), healthy("b")], "it can be read again");
    }

    #[test]
    fn report_names_pool_and_time() {
        let mut record = HealthRecord::default();
        record.record(&names(&["a"]), "", 77);
        let report = record.report("node-1").devices.remove(0);
        assert_eq!(report.device.unwrap().pool_name, "node-1");
        assert_eq!((report.last_updated_seconds, report.timeout_seconds), (77, 300));
    }
}
