//! Decides whether retained host memory must be freed, before the application reaches the
//! container's memory limit or uses up the node's memory.
//!
//! Host memory is short if the free part of the node's memory is below an eighth. It is also short
//! if the free part of the container's limit is below an eighth or below 1 GiB. If a value cannot
//! be read, host memory counts as short. While it is short, no copy is retained in host memory.
//! Limits of cgroups above the container's own are not visible inside the container.

use core::ffi::CStr;

use super::prefault::StagingPlace;
use crate::sys;

const MIN_BYTES: u64 = 1 << 30;
const PATH_BYTES: usize = 512;

/// Whether host memory is short now.
pub fn is_near() -> bool {
    would_be_near(0)
}

/// Whether host memory is short now for memory that is in this place. The container's limit does
/// not concern the host pool.
pub fn is_near_in(place: StagingPlace) -> bool {
    would_be_near_in(place, 0)
}

/// Whether host memory would be short after `bytes` more are used in this place.
pub fn would_be_near_in(place: StagingPlace, bytes: u64) -> bool {
    #[cfg(test)]
    let bytes =
        bytes.saturating_add(tests::TAKEN_BY_OTHERS.load(core::sync::atomic::Ordering::Relaxed));
    match place {
        StagingPlace::Own => would_be_near(bytes),
        StagingPlace::HostPool => {
            node().is_none_or(|(room, all)| room.saturating_sub(bytes) < all / 8)
        }
    }
}

/// Whether host memory would be short after `bytes` more are used.
pub fn would_be_near(bytes: u64) -> bool {
    let left = |room: u64| room.saturating_sub(bytes);
    node().is_none_or(|(room, all)| left(room) < all / 8)
        || group().is_none_or(|(room, limit)| left(room) < (limit / 8).max(MIN_BYTES))
}

/// Whether too little host memory would be left if `bytes` more were used. Too little is less than
/// a 64th of the node's memory. It is also less than a 128th of the container's limit, or less than
/// 32 MiB if the 128th is larger. With less memory, the kernel's out-of-memory killer may act.
///
/// The controller granted this memory on the basis of slightly earlier readings. This check detects
/// memory that other processes have used since then. A value that cannot be read is ignored.
///
/// The container's limit does not concern memory of the host pool.
pub fn is_critical(bytes: u64, place: StagingPlace) -> bool {
    const MAX_GROUP_FLOOR_BYTES: u64 = 32 << 20;
    #[cfg(test)]
    let bytes =
        bytes.saturating_add(tests::TAKEN_BY_OTHERS.load(core::sync::atomic::Ordering::Relaxed));
    let left = |room: u64| room.saturating_sub(bytes);
    node().is_some_and(|(room, all)| left(room) < all / 64)
        || place == StagingPlace::Own
            && group()
                .is_some_and(|(room, limit)| left(room) < (limit / 128).min(MAX_GROUP_FLOOR_BYTES))
}

/// Available and total memory of the node, in bytes.
fn node() -> Option<(u64, u64)> {
    let mut text = [0; 1024];
    let text = sys::read_file(c"/proc/meminfo", &mut text)?;
    let bytes = |name| field(text, name)?.checked_mul(1024);
    Some((bytes(b"MemAvailable:")?, bytes(b"MemTotal:")?))
}

/// Returns the bytes that are free below the container's memory limit, and the limit. Cached files
/// count as free, because the kernel drops them when their memory is needed.
fn group() -> Option<(u64, u64)> {
    const UNIFIED: [&[u8]; 3] = [b"memory.max", b"memory.current", b"memory.stat"];
    const FIRST: [&CStr; 3] = [
        c"/sys/fs/cgroup/memory/memory.limit_in_bytes",
        c"/sys/fs/cgroup/memory/memory.usage_in_bytes",
        c"/sys/fs/cgroup/memory/memory.stat",
    ];
    let mut own = [0; 1024];
    let own = sys::read_file(c"/proc/self/cgroup", &mut own).and_then(path_of).unwrap_or(b"/");
    let mut paths = [const { [0; PATH_BYTES] }; 3];
    let [first, second, third] = &mut paths;
    // If this process sees the cgroups of the whole node, its own cgroup is among them. Otherwise
    // its own cgroup is at the root.
    let folder = if exists(own, UNIFIED[0]) { own } else { b"/" };
    let unified = exists(folder, UNIFIED[0]);
    let [limit, usage, stat] = if unified {
        [
            path(folder, UNIFIED[0], first)?,
            path(folder, UNIFIED[1], second)?,
            path(folder, UNIFIED[2], third)?,
        ]
    } else {
        FIRST
    };
    let mut text = [0; 64];
    let limit = limit_of(sys::read_file(limit, &mut text)?)?;
    let usage = number(sys::read_file(usage, &mut text)?.trim_ascii())?;
    let mut text = [0; 8192];
    let text = sys::read_file(stat, &mut text)?;
    let name: &[u8] = if unified { b"inactive_file" } else { b"total_inactive_file" };
    let cached = field(text, name).unwrap_or(0);
    Some((limit.saturating_sub(usage.saturating_sub(cached)), limit))
}

/// Finds the path of this process's cgroup in the content of `/proc/self/cgroup`. `None`: the
/// process has no cgroup of version 2 (the unified hierarchy).
fn path_of(text: &[u8]) -> Option<&[u8]> {
    text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"0::"))
}

fn exists(group: &[u8], name: &[u8]) -> bool {
    path(group, name, &mut [0; PATH_BYTES]).is_some_and(sys::exists)
}

/// Builds the path of a file in a cgroup's folder. `None`: the path is too long.
fn path<'a>(group: &[u8], name: &[u8], place: &'a mut [u8; PATH_BYTES]) -> Option<&'a CStr> {
    let parts = [b"/sys/fs/cgroup", group, b"/", name, b"\0"];
    let whole = place.get_mut(..parts.iter().map(|part| part.len()).sum())?;
    let bytes = parts.iter().flat_map(|part| part.iter());
    whole.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    CStr::from_bytes_with_nul(whole).ok()
}

/// Parses the memory limit of a cgroup. The word `max`, and the large numbers that version 1 uses
/// instead, become [`NO_LIMIT`]. Then only the node's memory counts.
fn limit_of(text: &[u8]) -> Option<u64> {
    match text.trim_ascii() {
        b"max" => Some(NO_LIMIT),
        text => number(text).map(|limit| limit.min(NO_LIMIT)),
    }
}

/// Memory limits from this value on, in bytes, count as no limit. A pebibyte is more memory than
/// any node has.
const NO_LIMIT: u64 = 1 << 50;

/// Finds the line that begins with a name, and returns the number that follows the name.
fn field(text: &[u8], name: &[u8]) -> Option<u64> {
    let mut lines = text.split(|byte| *byte == b'\n');
    let rest = lines.find_map(|line| {
        line.strip_prefix(name).filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))
    })?;
    number(rest.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?)
}

fn number(text: &[u8]) -> Option<u64> {
    core::str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
pub mod tests {
    use core::sync::atomic::AtomicU64;

    use super::*;

    /// Number of bytes that a test sets as used by other processes. [`is_critical`] adds them to
    /// the memory that is really in use.
    pub static TAKEN_BY_OTHERS: AtomicU64 = AtomicU64::new(0);

    /// Memory that other processes must use so that about `bytes` are left before host memory is
    /// critical, in bytes.
    pub fn all_but(bytes: u64) -> u64 {
        let of_node = node().map(|(room, all)| room.saturating_sub(all / 64));
        let of_group =
            group().map(|(room, limit)| room.saturating_sub((limit / 128).min(32 << 20)));
        let free = [of_node, of_group].into_iter().flatten().min().unwrap_or(0);
        free.saturating_sub(bytes)
    }

    #[test]
    fn fields_match_whole_names_at_line_start() {
        let text = b"inactive_file_x 1\nxinactive_file 2\ninactive_file 30\nMemTotal:   7 kB\n";
        assert_eq!(field(text, b"inactive_file"), Some(30));
        assert_eq!(field(text, b"MemTotal:"), Some(7));
        assert_eq!(field(text, b"MemAvailable:"), None);
        assert_eq!(field(b"MemTotal: many", b"MemTotal:"), None);
    }

    #[test]
    fn no_limit_leaves_room_for_ever() {
        for text in [&b"max\n"[..], b"9223372036854771712\n"] {
            assert_eq!(limit_of(text), Some(NO_LIMIT));
        }
        assert_eq!(limit_of(b"1024\n"), Some(1024));
        assert_eq!(limit_of(b"\n"), None);
    }

    #[test]
    fn the_own_group_is_found_where_all_are_seen() {
        assert_eq!(path_of(b"0::/kubepods/pod1/a\n"), Some(&b"/kubepods/pod1/a"[..]));
        assert_eq!(path_of(b"1:name=x:/\n0::/b\n"), Some(&b"/b"[..]));
        assert_eq!(path_of(b"9:memory:/a\n"), None);
        let mut place = [0; PATH_BYTES];
        let found = path(b"/a/b", b"memory.max", &mut place);
        assert_eq!(found, Some(c"/sys/fs/cgroup/a/b/memory.max"));
        assert_eq!(path(&[b'a'; PATH_BYTES], b"memory.max", &mut place), None, "too long");
    }

    #[test]
    fn this_machine_can_be_read() {
        let (room, all) = node().unwrap();
        assert!(0 < room && room < all);
    }
}
