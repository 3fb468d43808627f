//! Checks that enough VRAM is free before a process restores itself without a controller.
//!
//! The process itself cannot query the free VRAM: while it is checkpointed, libcuda holds a lock of
//! the process's NVML (measured, driver 580). Another process can query it, so the agent runs
//! `nvidia-smi`, which container toolkits install next to the driver's libraries. A process without
//! this proof waits for the next controller, because a restore without enough VRAM loses the
//! process.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU8, Ordering};

use crate::{child, libc, sys};

/// Time limit for a run of `nvidia-smi`, in milliseconds. Without persistence mode, `nvidia-smi`
/// must first initialise the GPU's driver.
const NVML_TIMEOUT_MS: u64 = 10_000;
/// Folders in which container toolkits put `nvidia-smi`. They are searched after the folders of
/// `PATH`.
const FOLDERS: &[u8] = b"/usr/bin:/usr/local/bin:/usr/local/nvidia/bin";
const NAME: &[u8] = b"/nvidia-smi\0";
const MAX_PATH: usize = 256;
/// Value of `PATH` when [`note_path`] was called, truncated if it is longer. It ends with a zero
/// byte.
static FOLDERS_OF_PATH: [AtomicU8; 2048] = [const { AtomicU8::new(0) }; 2048];
const MIB: u64 = 1 << 20;

/// Stores the value of `PATH`, in which `nvidia-smi` is searched later. Must be called on the
/// application's thread. At any other time the application may change its environment, and libc
/// then frees the old value.
pub fn note_path() {
    // The caller of a setuid program must not choose which program it runs.
    let path = if libc::is_secure() { None } else { libc::environment(b"PATH") };
    let bytes = path.unwrap_or(b"").iter().copied().chain(core::iter::repeat(0));
    let [places @ .., _] = &FOLDERS_OF_PATH;
    places.iter().zip(bytes).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
}

/// Whether this many bytes, and a margin for the driver, are free on every device of the container.
/// Every device is checked, because only the driver knows which of them the process used.
pub fn has_room(vram_bytes: u64) -> bool {
    let mut path = [0; MAX_PATH];
    let Some(tool) = find(&mut path) else {
        return false;
    };
    let arguments =
        [c"nvidia-smi", c"--query-gpu=memory.free,memory.total", c"--format=csv,noheader,nounits"];
    let mut output = [0; 1024];
    child::output_of(tool, &arguments, NVML_TIMEOUT_MS, &mut output)
        .and_then(|said| has_room_everywhere(said, vram_bytes))
        .unwrap_or(false)
}

fn find(path: &mut [u8; MAX_PATH]) -> Option<&CStr> {
    let own = FOLDERS_OF_PATH.each_ref().map(|byte| byte.load(Ordering::Relaxed));
    let own = CStr::from_bytes_until_nul(&own).map_or(&b""[..], CStr::to_bytes);
    let folders = own.split(|b| *b == b':').chain(FOLDERS.split(|b| *b == b':'));
    for folder in folders.filter(|folder| folder.starts_with(b"/")) {
        let length = folder.len().saturating_add(NAME.len());
        let Some(whole) = path.get_mut(..length) else {
            continue;
        };
        for (to, from) in whole.iter_mut().zip(folder.iter().chain(NAME)) {
            *to = *from;
        }
        if CStr::from_bytes_with_nul(whole).is_ok_and(sys::exists) {
            return CStr::from_bytes_with_nul(path.get(..length)?).ok();
        }
    }
    None
}

/// Checks the output of `nvidia-smi`, which has a line with the free and the total MiB of each
/// device. Returns whether `vram_bytes` and a margin are free on every device. `None`: a line has
/// another form.
fn has_room_everywhere(said: &[u8], vram_bytes: u64) -> Option<bool> {
    // The text is handled as bytes, because this library must not use operations on text that could
    // panic.
    let lines = said.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    let mut rooms = lines.map(|line| {
        let mut fields = line.split(|byte| *byte == b',');
        let mut mib = || {
            let text = core::str::from_utf8(fields.next()?.trim_ascii()).ok()?;
            text.parse::<u64>().ok()?.checked_mul(MIB)
        };
        let (free_bytes, total_bytes) = (mib()?, mib()?);
        // The controller keeps the same margin free in addition to grants.
        let margin_bytes = (total_bytes / 50).min(512 * MIB);
        Some(vram_bytes.saturating_add(margin_bytes) <= free_bytes)
    });
    let first = rooms.next()??;
    rooms.try_fold(first, |all, room| Some(all && room?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_needs_free_vram_and_margin() {
        let one = b"1020, 1000\n";
        assert_eq!(has_room_everywhere(one, 1000 * MIB), Some(true));
        assert_eq!(has_room_everywhere(one, 1000 * MIB + 1), Some(false));
        assert_eq!(has_room_everywhere(b"140000, 143771\n", 139_488 * MIB), Some(true));
        assert_eq!(has_room_everywhere(b"140000, 143771\n", 139_489 * MIB), Some(false));
        assert_eq!(has_room_everywhere(b"500, 1000\n100, 1000\n", 400 * MIB), Some(false));
    }

    #[test]
    fn unparsable_output_proves_nothing() {
        for said in ["", "\n", "No devices were found\n", "[N/A], 81559\n", "500, 1000\nError\n"] {
            assert_eq!(has_room_everywhere(said.as_bytes(), 1), None, "{said}");
        }
    }
}
