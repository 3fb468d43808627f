//! Computes the host memory in use for the offloaded VRAM of a node's containers.

use affinode_proto::api::control;

/// Returns the host memory in use for all offloaded VRAM, in bytes. Zeros are not stored and do not
/// count, and neither does content on disk. Deduplicated memory counts once.
pub(super) fn used_bytes(list: &control::ListResponse) -> u64 {
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let each = sum(&mut list.containers.iter().map(of_container));
    let shared = sum(&mut list.gpus.iter().map(|gpu| gpu.copier_shared_bytes));
    let stored = sum(&mut list.gpus.iter().map(|gpu| gpu.copier_stored_bytes));
    each.saturating_sub(shared).saturating_add(stored)
}

fn of_container(c: &control::Container) -> u64 {
    let offloaded = c.processes.iter().filter(|p| !p.offloaded.is_empty());
    let left_out =
        offloaded.map(|p| p.zero_bytes.min(p.copied_out_bytes)).fold(0, u64::saturating_add);
    c.offloaded_bytes.saturating_sub(left_out).saturating_sub(c.disk_bytes)
}

#[cfg(test)]
mod tests {
    use super::{super::Node, *};

    #[test]
    fn deduplicated_memory_counts_once() {
        let device = control::DeviceBytes::default();
        let container = control::Container {
            offloaded_bytes: 100,
            processes: vec![control::Process {
                offloaded: vec![device],
                zero_bytes: 10,
                copied_out_bytes: 90,
                ..control::Process::default()
            }],
            ..control::Container::default()
        };
        let node = |copiers: &[(u64, u64)]| {
            let gpu = |(shared, stored): &(u64, u64)| control::Gpu {
                copier_shared_bytes: *shared,
                copier_stored_bytes: *stored,
                ..control::Gpu::default()
            };
            let (containers, gpus) =
                (vec![container.clone(); 2], copiers.iter().map(gpu).collect());
            let list =
                control::ListResponse { containers, gpus, ..control::ListResponse::default() };
            Node::from(list)
        };
        let used = |copiers: &[(u64, u64)]| node(copiers).host_used_bytes;
        assert_eq!(used(&[]), 180);
        assert_eq!(used(&[(80, 40), (0, 0)]), 140);
        assert_eq!(used(&[(80, 40), (20, 10)]), 130);
        assert_eq!(used(&[(500, 40)]), 40, "one process was restored meanwhile");
        let gpu = &node(&[(80, 40)]).gpus[0];
        let on_disk = control::Container { disk_bytes: 70, ..container.clone() };
        assert_eq!(of_container(&on_disk), 20);
        assert_eq!((gpu.copier_shared_bytes, gpu.copier_stored_bytes), (80, 40));
    }
}
