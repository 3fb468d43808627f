//! The controller's list of the node's GPUs, and the exchange of two GPUs for a restore on another
//! GPU.
//!
//! For such a restore, the driver requires a pair of the old and the new GPU for every GPU of the
//! node (measured, driver 580). The driver then opens the device files of all GPUs in this process.
//! A process that cannot open all of these files is not moved to another GPU, because it is unknown
//! how the driver would fail.

use core::ffi::CStr;

use affinode_cuda_sys::GpuPair;
use affinode_proto::wire::message::{GPUS_PER_FRAME, Gpu, MAX_GPUS};

use super::host;
use crate::sys;

/// Version of the first driver whose restore accepts pairs of an old and a new GPU (CUDA 13.0).
const MIN_DRIVER: u32 = 13_000;

/// The controller's list of the node's GPUs, or the part of it that has arrived.
#[derive(Clone, Copy)]
pub struct GpuMap {
    total: usize,
    come: usize,
    known: [Gpu; MAX_GPUS],
}

/// Pairs for the driver's restore: each GPU of the node, and the GPU that replaces it.
pub struct DevicePairs {
    many: usize,
    pairs: [GpuPair; MAX_GPUS],
}

impl DevicePairs {
    /// The pairs that are in use, without the unused rest of the array.
    pub fn all(&self) -> &[GpuPair] {
        self.pairs.get(..self.many).unwrap_or_default()
    }
}

impl GpuMap {
    pub const fn none() -> GpuMap {
        GpuMap { total: 0, come: 0, known: [Gpu { uuid: [0; 16], minor: 0 }; MAX_GPUS] }
    }

    /// Stores the next part of the controller's list of GPUs. The first part of a list replaces the
    /// previous list. If a part is missing, the whole list is discarded.
    pub fn take(&mut self, first: u8, total: u8, part: &[Gpu; GPUS_PER_FRAME]) {
        let (first, total) = (usize::from(first), usize::from(total));
        if first == 0 {
            *self = GpuMap { total, ..GpuMap::none() };
        }
        if first != self.come || total != self.total {
            *self = GpuMap::none();
            return;
        }
        let places = self.known.iter_mut().take(total).skip(first);
        for (to, gpu) in places.zip(part) {
            *to = *gpu;
            self.come += 1;
        }
    }

    fn all(&self) -> &[Gpu] {
        self.known.get(..self.come).filter(|all| all.len() == self.total).unwrap_or_default()
    }

    /// Returns the pairs that exchange the GPUs `from` and `to`, and map every other GPU to itself.
    /// `None`: an index or a GPU is invalid, or the list is incomplete.
    pub fn exchanged(&self, from: u8, to: u8) -> Option<DevicePairs> {
        let all = self.all();
        let (from, to) = (usize::from(from), usize::from(to));
        let (one, other) = (all.get(from)?, all.get(to).filter(|_| from != to)?);
        let twice = |(n, gpu): (usize, &Gpu)| all.iter().skip(n + 1).any(|g| g.uuid == gpu.uuid);
        if all.iter().any(|gpu| gpu.uuid == [0; 16]) || all.iter().enumerate().any(twice) {
            return None;
        }
        let mut pairs = DevicePairs { many: all.len(), pairs: [GpuPair::default(); MAX_GPUS] };
        for (index, (pair, gpu)) in pairs.pairs.iter_mut().zip(all).enumerate() {
            let new = match index {
                _ if index == from => other,
                _ if index == to => one,
                _ => gpu,
            };
            *pair = GpuPair { old: gpu.uuid, new: new.uuid };
        }
        Some(pairs)
    }

    /// Whether this process can open the device files of all GPUs.
    pub fn are_reachable(&self) -> bool {
        self.all().iter().all(|gpu| {
            let mut path = [0; 32];
            device_file(gpu.minor, &mut path).is_some_and(sys::can_open)
        })
    }
}

/// Whether the driver can restore a process on another GPU.
pub fn driver_can() -> bool {
    host::driver_version() >= MIN_DRIVER
}

fn device_file(minor: u32, buffer: &mut [u8; 32]) -> Option<&CStr> {
    let mut digits = [0_u8; 10];
    let (mut rest, mut begin) = (minor, digits.len());
    loop {
        begin -= 1;
        *digits.get_mut(begin)? = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let path = b"/dev/nvidia".iter().chain(digits.get(begin..)?).chain(&[0]);
    for (to, from) in buffer.iter_mut().zip(path) {
        *to = *from;
    }
    CStr::from_bytes_until_nul(buffer).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> Gpu {
        Gpu { uuid: [n + 1; 16], minor: u32::from(n) }
    }

    fn part(first: u8) -> [Gpu; GPUS_PER_FRAME] {
        [0, 1, 2, 3, 4].map(|n| gpu(first + n))
    }

    #[test]
    fn two_change_places_and_all_are_named() {
        let mut gpus = GpuMap::none();
        assert!(gpus.exchanged(0, 1).is_none());
        gpus.take(0, 7, &part(0));
        assert!(gpus.exchanged(0, 1).is_none(), "a part of the list is missing");
        gpus.take(5, 7, &part(5));
        let pairs = gpus.exchanged(6, 1).unwrap();
        let pairs: Vec<_> = pairs.all().iter().map(|p| (p.old[0] - 1, p.new[0] - 1)).collect();
        assert_eq!(pairs, [(0, 0), (1, 6), (2, 2), (3, 3), (4, 4), (5, 5), (6, 1)]);
        for (from, to) in [(0, 7), (7, 0), (3, 3), (255, 0)] {
            assert!(gpus.exchanged(from, to).is_none(), "{from}, {to}");
        }
    }

    #[test]
    fn a_list_that_is_not_in_order_is_none() {
        let mut gpus = GpuMap::none();
        gpus.take(0, 12, &part(0));
        gpus.take(10, 12, &part(10));
        gpus.take(5, 12, &part(5));
        assert!(gpus.exchanged(0, 1).is_none());
        gpus.take(0, 12, &part(0));
        gpus.take(5, 11, &part(5));
        assert!(gpus.exchanged(0, 1).is_none(), "a part of a list of another length");
        gpus.take(0, 2, &part(0));
        assert_eq!(gpus.exchanged(0, 1).unwrap().all().len(), 2);
        for bad in [[0; 16], gpu(0).uuid] {
            let mut gpus = GpuMap::none();
            let mut part = part(0);
            part[3].uuid = bad;
            gpus.take(0, 4, &part);
            assert!(gpus.exchanged(1, 2).is_none(), "{bad:?} is none, or another");
        }
        gpus.take(0, 255, &part(0));
        (1..51).for_each(|n| gpus.take(n * 5, 255, &part(0)));
        assert!(gpus.exchanged(0, 1).is_none(), "the list is longer than the array");
    }

    #[test]
    fn device_files_have_their_numbers() {
        let name = |minor| device_file(minor, &mut [0; 32]).unwrap().to_owned();
        assert_eq!(name(0).as_c_str(), c"/dev/nvidia0");
        assert_eq!(name(10).as_c_str(), c"/dev/nvidia10");
        assert_eq!(name(u32::MAX).as_c_str(), c"/dev/nvidia4294967295");
    }
}
