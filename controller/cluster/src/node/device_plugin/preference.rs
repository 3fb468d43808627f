//! Chooses which of the free seats a container gets. The seats of one container are on different
//! GPUs where possible. Among these GPUs, the GPU with the fewest taken seats comes first.

use std::collections::{BTreeMap, BTreeSet};

use super::seats::SeatList;

/// Chooses up to `size` seats from `available`. The choice contains the seats in `included`.
/// Identities that belong to no seat are ignored, because an error would make the kubelet refuse
/// the pod.
#[must_use]
pub fn choose(
    seats: &SeatList,
    available: &[String],
    included: &[String],
    size: usize,
) -> Vec<String> {
    let known =
        |ids: &[String]| -> BTreeSet<_> { ids.iter().filter_map(|id| seats.find(id)).collect() };
    let included = known(included);
    let mut free: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
    for (gpu, number) in known(available) {
        free.entry(gpu).or_default().insert(number);
    }
    let mut own: BTreeMap<usize, u32> = BTreeMap::new();
    for (gpu, number) in &included {
        free.entry(*gpu).or_default().remove(number);
        *own.entry(*gpu).or_default() += 1;
    }
    let mut chosen: Vec<(usize, u32)> = included.into_iter().take(size).collect();
    while chosen.len() < size {
        let rank = |gpu: usize, left: usize| {
            let taken = seats.gpus[gpu].seats.saturating_sub(u32::try_from(left).unwrap_or(0));
            (own.get(&gpu).copied().unwrap_or(0), taken, gpu)
        };
        let open = free.iter().filter(|(_, left)| !left.is_empty());
        let Some((_, _, gpu)) = open.map(|(gpu, left)| rank(*gpu, left.len())).min() else { break };
        let Some(number) = free.get_mut(&gpu).and_then(BTreeSet::pop_first) else { break };
        *own.entry(gpu).or_default() += 1;
        chosen.push((gpu, number));
    }
    chosen.into_iter().map(|(gpu, number)| seats.gpus[gpu].seat_id(number)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::device_plugin::seats::SeatedGpu;

    fn node(seats: &[u32]) -> SeatList {
        let gpu = |(index, seats): (u32, &u32)| SeatedGpu {
            uuid: format!("G{index}"),
            index,
            seats: *seats,
            fault: None,
            kept_seats: None,
        };
        SeatList { gpus: (0..).zip(seats).map(gpu).collect() }
    }

    fn ids(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn chosen(seats: &[u32], available: &str, included: &str, size: usize) -> String {
        choose(&node(seats), &ids(available), &ids(included), size).join(" ")
    }

    #[test]
    fn least_used_gpu_comes_first() {
        assert_eq!(chosen(&[2, 2], "G0::1 G1::0 G1::1", "", 1), "G1::0");
        assert_eq!(chosen(&[2, 2], "G0::1 G1::1", "", 1), "G0::1", "equal: the lower index");
        assert_eq!(chosen(&[3, 3], "G0::0 G0::1 G1::2", "", 1), "G0::0");
    }

    #[test]
    fn several_seats_are_on_different_gpus() {
        let all = "G0::0 G0::1 G0::2 G1::0 G1::1 G2::0";
        assert_eq!(chosen(&[3, 2, 1], all, "", 3), "G0::0 G1::0 G2::0");
        assert_eq!(chosen(&[3, 2, 1], all, "", 4), "G0::0 G1::0 G2::0 G0::1");
        // One GPU has the seats of others, and the container already has a seat of another.
        assert_eq!(chosen(&[3, 2, 1], "G0::0 G0::1 G1::1", "G0::0", 2), "G0::0 G1::1");
    }

    #[test]
    fn choice_is_limited_by_what_is_free() {
        assert_eq!(chosen(&[2], "G0::1", "", 5), "G0::1");
        assert_eq!(chosen(&[2], "G0::1 G0::1 G0::7 G9::0 G0 G0::01 x", "", 2), "G0::1");
        assert_eq!(chosen(&[2], "G0::0", "", 0), "");
        assert_eq!(chosen(&[2], "G0::0 G0::1", "G0::0 G0::1", 1), "G0::0");
    }
}
