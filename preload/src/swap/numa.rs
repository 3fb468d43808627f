//! Finds the processors nearest to a GPU. A page of host memory comes from the NUMA node whose
//! processor touches the page first. The farther that node is from the GPU, the slower are copies
//! to the GPU.
//!
//! The library does not set a memory policy of the kernel, because the usual seccomp filter of a
//! container refuses that system call.

use affinode_cuda_sys::{device_attribute, result};

use super::contexts::in_context;
use super::driver::call;
use crate::sys::{self, CpuSet};

/// Maximum length, in bytes, of the kernel's list of the processors of a node. A longer list is
/// possible, for example if 4096 processors alternate between two nodes. In that case processors of
/// any node are used.
const MAX_BYTES: usize = 4096;

/// The processors nearest to the device of a context. `None`: no node is nearer than others, or it
/// is unknown.
pub fn processors(context: usize) -> Option<CpuSet> {
    let (mut device, mut node) = (0, -1);
    let code = in_context(context, || call!(ctx_get_device(&raw mut device)));
    (code == result::SUCCESS).then_some(())?;
    let code = call!(device_get_attribute(&raw mut node, device_attribute::HOST_NUMA_ID, device));
    (code == result::SUCCESS).then_some(())?;
    processors_of(node)
}

/// Limits the calling thread to those of its permitted processors that are also in `near`. If there
/// are none, nothing changes.
pub fn stay(near: &CpuSet) {
    let mut both = sys::processors_allowed().unwrap_or([0; 128]);
    both.iter_mut().zip(near).for_each(|(allowed, near)| *allowed &= near);
    // Without a common processor the thread keeps its own set.
    sys::run_on(&both);
}

pub(super) fn processors_of(node: i32) -> Option<CpuSet> {
    let mut path = *b"/sys/devices/system/node/node\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let start = path.iter().position(|byte| *byte == 0)?;
    let number = u32::try_from(node).ok().filter(|node| *node < 1_000)?;
    let digits = [number / 100, number / 10 % 10, number % 10].map(|digit| b'0' + digit as u8);
    let shown = if number < 10 { 2 } else { usize::from(number < 100) };
    let rest = digits.iter().skip(shown).chain(b"/cpulist");
    path.iter_mut().skip(start).zip(rest).for_each(|(to, from)| *to = *from);
    let mut buffer = [0; MAX_BYTES];
    let path = core::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    parse(sys::read_file(path, &mut buffer)?)
}

/// Parses the kernel's list of processors, such as `0-47,96-143`. `None`: it is empty or has
/// another form.
fn parse(list: &[u8]) -> Option<CpuSet> {
    let mut set = [0; 128];
    let list = list.strip_suffix(b"\n")?;
    for part in list.split(|byte| *byte == b',') {
        let mut ends = part.splitn(2, |byte| *byte == b'-').map(number);
        let first = ends.next()??;
        let last = ends.next().unwrap_or(Some(first))?;
        for processor in first..=last {
            *set.get_mut(processor / 64)? |= 1 << (processor % 64);
        }
    }
    Some(set)
}

fn number(digits: &[u8]) -> Option<usize> {
    core::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(list: &str) -> Option<Vec<usize>> {
        let set = parse(list.as_bytes())?;
        Some((0..8192).filter(|n| set[n / 64] & 1 << (n % 64) != 0).collect())
    }

    #[test]
    fn processor_lists_of_the_kernel_are_parsed() {
        assert_eq!(listed("0-3,8,64-65\n").unwrap(), [0, 1, 2, 3, 8, 64, 65]);
        assert_eq!(listed("0\n").unwrap(), [0]);
        for bad in ["", "\n", "0-3", "0,\n", "-1\n", "3-x\n", "0-8192\n", "99999999999999999999\n"]
        {
            assert_eq!(listed(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn thread_stays_on_its_allowed_processors() {
        let everywhere = sys::processors_allowed().unwrap();
        let first = (0..8192).find(|n| everywhere[n / 64] & 1 << (n % 64) != 0).unwrap();
        let mut one = [0; 128];
        one[first / 64] = 1 << (first % 64);
        std::thread::spawn(move || {
            assert!(!sys::run_on(&[0; 128]), "an empty set of processors is refused");
            assert_eq!(sys::processors_allowed(), Some(everywhere));
            assert!(sys::run_on(&one));
            assert_eq!((sys::processors(), sys::processors_allowed()), (1, Some(one)));
            stay(&everywhere);
            assert_eq!(
                sys::processors_allowed(),
                Some(one),
                "the thread uses only processors that it was allowed to use"
            );
        })
        .join()
        .unwrap();
    }

    /// The library must find exactly the NUMA nodes of the machine on which the test runs, each
    /// with the processors in the kernel's list.
    #[test]
    fn the_nodes_of_this_machine_are_known() {
        for node in 0..1_000 {
            let list = std::fs::read(format!("/sys/devices/system/node/node{node}/cpulist"));
            assert_eq!(processors_of(node), list.ok().and_then(|list| parse(&list)), "{node}");
        }
        assert_eq!(processors_of(-1), None);
        assert_eq!(processors_of(1_000), None);
    }
}
