//! The ledger of promised VRAM. It promises VRAM before a restore, each byte to at most one
//! container. NVML then proves that the VRAM is free at the moment of the restore. If a restore
//! found too little VRAM, its process would be lost, because the driver cannot undo a restore.

use std::collections::BTreeMap;

use super::{DeviceBytes, Key, input::GpuSample};

/// The ledger: promises of VRAM that the containers have not allocated yet.
#[derive(Debug, Default)]
pub struct Ledger {
    promised: BTreeMap<Key, Vec<DeviceBytes>>,
}

impl Ledger {
    /// Whether a container fits in addition to the promises to other containers. `needs`: the VRAM
    /// that it needs on each GPU. `margin(total)`: number of bytes that must stay free on a GPU
    /// with `total` bytes. `held(uuid)`: VRAM that the container has on that GPU now, in bytes. The
    /// margin is not required if the container needs nearly all VRAM of the GPU. A GPU without a
    /// sample has no free VRAM.
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
                // A container that had nearly all VRAM of a GPU may get the same amount again
                // without the margin. If the margin were required, it would never fit.
                let had = need.bytes.saturating_add(held(&need.uuid));
                let fills = had > gpu.total_bytes.saturating_sub(margin);
                let margin = if fills { 0 } else { margin };
                need.bytes.saturating_add(others).saturating_add(margin) <= free
            })
        })
    }

    /// Records a promise of VRAM to a container. It replaces an earlier promise to the same
    /// container.
    pub fn promise(&mut self, key: &Key, needs: Vec<DeviceBytes>) {
        self.promised.insert(key.clone(), needs);
    }

    /// Removes the promise to a container, after the VRAM was taken or the promise was given up.
    pub fn release(&mut self, key: &Key) {
        self.promised.remove(key);
    }

    /// VRAM promised to a container, in bytes over all GPUs.
    #[must_use]
    pub fn promised_to(&self, key: &Key) -> u64 {
        self.promised.get(key).into_iter().flatten().map(|p| p.bytes).sum()
    }

    /// VRAM of a GPU that is promised to containers, in bytes.
    #[must_use]
    pub fn promised_bytes(&self, uuid: &str) -> u64 {
        self.promised.values().flatten().filter(|p| p.uuid == uuid).map(|p| p.bytes).sum()
    }
}

/// VRAM that must stay free on each GPU in addition to promises: 2 %, at most 512 MiB. It covers
/// VRAM that the driver allocates in addition to the memory of processes.
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
    fn unknown_gpu_has_no_free_vram() {
        assert!(!Ledger::default().fits(&key(1), &need(1), nothing, &[], margin_bytes));
    }

    #[test]
    fn own_promise_does_not_count_against_fit() {
        let mut ledger = Ledger::default();
        ledger.promise(&key(1), need(900));
        assert!(ledger.fits(&key(1), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
        assert!(!ledger.fits(&key(2), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
        ledger.release(&key(1));
        assert!(ledger.fits(&key(2), &need(900), nothing, &[gpu(1000, 0)], margin_bytes));
    }

    #[test]
    fn margin_is_waived_for_a_gpu_filling_process() {
        let ledger = Ledger::default();
        let fits =
            |held: u64| ledger.fits(&key(1), &need(740), |_| held, &[gpu(1000, 250)], margin_bytes);
        assert!(fits(250));
        assert!(!fits(0), "other VRAM is in use: the driver needs the margin");
    }

    proptest! {
        /// Promises never exceed the free VRAM, whatever the order of requests.
        #[test]
        fn promises_never_exceed_free_vram(total in 1_u64..1_000_000, asks in proptest::collection::vec((0_u8..8, 0_u64..500_000, any::<bool>()), 0..64)) {
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
