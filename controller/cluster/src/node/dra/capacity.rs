//! Computes how much memory of a GPU the resource claims may request in total.

use affinode_controller::inventory::gpu_facts::NodeGpus;

const MIB: u64 = 1 << 20;

/// A factor from 1 to 16 by which the capacity of a GPU may exceed its VRAM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OversubscriptionFactor(f64);

/// Error for a text that is not an oversubscription factor.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an oversubscription factor; accepted: a number from 1 to 16, such as 2.0")]
pub struct FactorError(String);

impl std::str::FromStr for OversubscriptionFactor {
    type Err = FactorError;

    fn from_str(text: &str) -> Result<Self, FactorError> {
        let factor = text.parse::<f64>().ok().filter(|factor| (1.0..=16.0).contains(factor));
        factor.map(OversubscriptionFactor).ok_or_else(|| FactorError(text.to_owned()))
    }
}

impl OversubscriptionFactor {
    /// Returns the oversubscription factor for a GPU that is to have this number of seats. A number
    /// below 1 counts as 1, and a number above 16 counts as 16.
    #[must_use]
    pub fn of_seats(seats: u8) -> Self {
        Self(f64::from(seats.clamp(1, 16)))
    }

    /// Returns the memory beyond `vram_bytes` that this factor allows, in bytes.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "the product is at most 16 times the VRAM, and an error of a few bytes is harmless"
    )]
    fn beyond(self, vram_bytes: u64) -> u64 {
        ((self.0 - 1.0) * vram_bytes as f64) as u64
    }
}

/// Memory of a GPU that is offered to claims, in bytes, as a ResourceSlice contains it. All values
/// are multiples of 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryCapacity {
    /// Memory that all claims of the GPU together may request.
    pub total_bytes: u64,
    /// Maximum memory that one claim may request, which is the VRAM of the GPU. No container can
    /// use more memory of one GPU.
    pub vram_bytes: u64,
}

/// Computes the capacity of a GPU with `vram_bytes`:
///
/// ```text
/// VRAM + min((factor - 1) * VRAM, host memory * VRAM / VRAM of all GPUs)
/// ```
///
/// Memory that exceeds the VRAM is offloaded while other containers use the GPU, so the host memory
/// must be able to hold it. The GPUs of a node share its host memory in proportion to their VRAM. A
/// GPU that cannot be read also gets a share, because host memory may hold the VRAM of its
/// containers. For this share, the GPU counts as if it had the VRAM of the node's largest GPU.
#[must_use]
pub fn memory(node: &NodeGpus, vram_bytes: u64, factor: OversubscriptionFactor) -> MemoryCapacity {
    let whole = node.gpus.iter().filter(|gpu| !gpu.mig).map(|gpu| u128::from(gpu.vram_bytes));
    let largest_bytes = whole.clone().max().unwrap_or_default();
    let all_bytes = whole.sum::<u128>() + largest_bytes * node.unreadable.len() as u128;
    let share = u128::from(node.host_memory_bytes) * u128::from(vram_bytes) / all_bytes.max(1);
    let beyond = factor.beyond(vram_bytes).min(u64::try_from(share).unwrap_or(u64::MAX));
    MemoryCapacity {
        total_bytes: whole_mib(vram_bytes.saturating_add(beyond)),
        vram_bytes: whole_mib(vram_bytes),
    }
}

/// Computes how many containers may each fill the VRAM of a GPU: the capacity in units of the VRAM,
/// rounded down. It is at least 1.
#[must_use]
pub fn seats(node: &NodeGpus, vram_bytes: u64, factor: OversubscriptionFactor) -> u32 {
    let capacity = memory(node, vram_bytes, factor);
    let seats = capacity.total_bytes.checked_div(capacity.vram_bytes).unwrap_or(1);
    u32::try_from(seats.max(1)).unwrap_or(1)
}

fn whole_mib(bytes: u64) -> u64 {
    bytes / MIB * MIB
}

#[cfg(test)]
mod tests {
    use affinode_controller::inventory::gpu_facts::GpuFacts;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn node(host_gib: u64, gpus_gib: &[u64]) -> NodeGpus {
        let gpu = |gib: &u64| GpuFacts { vram_bytes: gib * GIB, ..GpuFacts::default() };
        NodeGpus {
            host_memory_bytes: host_gib * GIB,
            gpus: gpus_gib.iter().map(gpu).collect(),
            ..NodeGpus::default()
        }
    }

    fn capacity_gib(node: &NodeGpus, vram_gib: u64, factor: &str) -> u64 {
        memory(node, vram_gib * GIB, factor.parse().unwrap()).total_bytes / GIB
    }

    #[test]
    fn factor_applies_if_host_memory_suffices() {
        let node = node(1000, &[80, 80]);
        assert_eq!(capacity_gib(&node, 80, "1"), 80);
        assert_eq!(capacity_gib(&node, 80, "1.5"), 120);
        assert_eq!(capacity_gib(&node, 80, "2.0"), 160);
    }

    #[test]
    fn host_memory_limits_the_capacity() {
        let node = node(64, &[80, 80]);
        assert_eq!(capacity_gib(&node, 80, "4"), 80 + 32, "two equal GPUs share it in halves");
        let mut uneven = self::node(40, &[80, 20]);
        assert_eq!([80, 20].map(|gib| capacity_gib(&uneven, gib, "4")), [80 + 32, 20 + 8]);
        uneven.gpus[0].mig = true;
        assert_eq!(capacity_gib(&uneven, 20, "4"), 20 + 40, "a GPU in MIG mode gets no share");
    }

    #[test]
    fn unreadable_gpu_keeps_its_share() {
        let mut node = node(480, &[80, 80, 80]);
        node.unreadable = vec!["GPU 3: lost".into()];
        assert_eq!(capacity_gib(&node, 80, "4"), 80 + 120);
    }

    #[test]
    fn capacity_is_in_whole_mebibytes() {
        let node = node(10, &[1]);
        let capacity = memory(&node, GIB + 5, "1.00001".parse().unwrap());
        assert_eq!(capacity, MemoryCapacity { total_bytes: GIB, vram_bytes: GIB });
    }

    #[test]
    fn seats_are_whole_gpus_of_the_capacity() {
        let seats = |host_gib, gpus: &[u64], factor: &str| {
            let node = node(host_gib, gpus);
            seats(&node, gpus[0] * GIB, factor.parse().unwrap())
        };
        assert_eq!(seats(1000, &[80, 80], "2"), 2);
        assert_eq!(seats(1000, &[80, 80], "3.9"), 3);
        assert_eq!(seats(1000, &[80, 80], "1"), 1);
        // Each GPU has 100 GiB of the host memory: one more seat.
        assert_eq!(seats(200, &[80, 80], "16"), 2);
        assert_eq!(seats(159, &[80, 80], "16"), 1, "79.5 GiB hold no further GPU");
        assert_eq!(seats(10, &[0], "4"), 1, "a GPU without a size");
        let fixed = OversubscriptionFactor::of_seats(4);
        assert_eq!(self::seats(&node(1000, &[80]), 80 * GIB, fixed), 4);
    }

    #[test]
    fn factor_outside_its_range_is_refused() {
        for text in ["0.9", "17", "-2", "NaN", "inf", "two", ""] {
            assert!(text.parse::<OversubscriptionFactor>().is_err(), "{text:?}");
        }
    }
}
