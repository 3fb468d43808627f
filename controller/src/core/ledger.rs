//! Who was promised which VRAM. A restore that lacks room loses its process
//! (the driver has no way back), so room is promised before, to one at a time
//! for each byte, and proven free by NVML at the moment of the restore.

use std::collections::BTreeMap;

use super::{DeviceBytes, Key, input::GpuSample};

/// Promises that have not become VRAM yet.
#[derive(Debug, Default)]
pub struct Ledger {
    promised: BTreeMap<Key, Vec<DeviceBytes>>,
}

impl Ledger {
    /// Whether `needs` fit beside the promises made to others, each device keeping
    /// `margin(total)` bytes free. A device that is not in `gpus` has no room. `held(uuid)`: what
    /// the container has there already, in bytes.
    #[must_use]
    pub fn fits(
        &self,
        key: &Key,
        needs: &[DeviceBytes],
        held: impl Fn(&str) -> u64,
        gpus: &[GpuSample],
        margin: fn(u64) -> u64,
    ) -> bool {
        needs.iter().all(|need| {
            gpus.iter().find(|gpu| gpu.uuid == need.uuid).is_some_and(|gpu| {
                let others: u64 = self
                    .promised
                    .iter()
                    .filter(|(other, _)| *other != key)
                    .flat_map(|(_, promises)| promises)
                    .filter(|promise| promise.uuid == need.uuid)
                    .fold(0, |sum, promise| sum.saturating_add(promise.bytes));
                let free = gpu.total_bytes.saturating_sub(gpu.used_bytes);
                let margin = margin(gpu.total_bytes);
                // Who had nearly all of a device returns to what it had, or never would.
                let had = need.bytes.saturating_add(held(&need.uuid));
                let fills = had > gpu.total_bytes.saturating_sub(margin);
                let margin = if fills { 0 } else { margin };
                need.bytes.saturating_add(others).saturating_add(margin) <= free
            })
        })
    }

    /// Notes a promise; replaces an earlier one to the same container.
    pub fn promise(&mut self, key: &Key, needs: Vec<DeviceBytes>) {
        self.promised.insert(key.clone(), needs);
    }

    /// The promise was kept or given up.
    pub fn release(&mut self, key: &Key) {
        self.promised.remove(key);
    }

    /// Bytes promised to a container, over all devices.
    #[must_use]
    pub fn promised_to(&self, key: &Key) -> u64 {
        self.promised.get(key).into_iter().flatten().map(|p| p.bytes).sum()
    }

    /// Bytes promised on a device.
    #[must_use]
    pub fn promised_bytes(&self, uuid: &str) -> u64 {
        self.promised.values().flatten().filter(|p| p.uuid == uuid).map(|p| p.bytes).sum()
    }
}

/// What every device keeps free beside promises: 2% of it, at most 512 MiB, for
/// what the driver takes beyond a process's own figure.
#[must_use]
pub fn margin_bytes(total_bytes: u64) -> u64 {
    (total_bytes / 50).min(512 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8) -> Key {
        Key::parse(&format!("{n:032x}")).unwrap()
    }

    fn gpu(total_bytes: u64, used_bytes: u64) -> GpuSample {
        GpuSample { uuid: "GPU-0".into(), total_bytes, used_bytes, ..GpuSample::default() }
    }

    fn nothing(_: &str) -> u64 {
        0
    }

    fn need(bytes: u64) -> Vec<DeviceBytes> {
        vec![DeviceBytes { uuid: "GPU-0".into(), bytes }]
    }

    #[test]
    fn an_unknown_device_has_no_room() {
        assert!(!Ledger::default().fits(&key(1), &need(1), nothing, &[], margin_bytes));
    }

    #[test]
    fn ones_own_promise_does_not_stand_in_the_way() {
        let mut ledger = Ledger::default();
        ledger.promise(&key(1), need(900));
        assert!(ledger.fits(&key(1), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
        assert!(!ledger.fits(&key(2), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
        ledger.release(&key(1));
        assert!(ledger.fits(&key(2), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
    }

    #[test]
    fn who_had_nearly_all_of_a_device_returns_to_it_also_where_a_part_of_it_never_left() {
        let ledger = Ledger::default();
        let fits =
            |held: u64| ledger.fits(&key(1), &need(740), |_| held, &[gpu(1000, 250)], margin_bytes);
        assert!(fits(250));
        assert!(!fits(0), "of others: then there is no room for what the driver takes beside");
    }

    proptest! {
        /// Whatever is asked for in whatever order, promises never exceed what is free.
        #[test]
        fn never_overcommits(total in 1_u64..1_000_000, asks in proptest::collection::vec((0_u8..8, 0_u64..500_000, any::<bool>()), 0..64)) {
            let mut ledger = Ledger::default();
            let used = total / 4;
            for (who, bytes, take) in asks {
                if take {
                    let gpus = [gpu(total, used)];
                    if ledger.fits(&key(who), &need(bytes), nothing, &gpus, margin_bytes) {
                        ledger.promise(&key(who), need(bytes));
                    }
                } else {
                    ledger.release(&key(who));
                }
                prop_assert!(ledger.promised_bytes("GPU-0") + used <= total);
            }
        }
    }
}
