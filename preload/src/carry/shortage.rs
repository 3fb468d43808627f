//! Whether host memory that is only kept should rather be free: before the container's memory
//! limit, or the node's memory, is reached by what the application takes.
//!
//! An eighth of the limit, at least 1 GiB, is to be left, and an eighth of the node. What cannot
//! be read counts as short: nothing is kept in the dark. Limits above the container's own are not
//! seen from inside.

use core::ffi::CStr;

use crate::sys;

const LEAST_BYTES: u64 = 1 << 30;

/// Whether it is.
pub fn is_near() -> bool {
    would_be_near(0)
}

/// Whether it is once so much more is taken.
pub fn would_be_near(bytes: u64) -> bool {
    let left = |room: u64| room.saturating_sub(bytes);
    node().is_none_or(|(room, all)| left(room) < all / 8)
        || group().is_none_or(|(room, limit)| left(room) < (limit / 8).max(LEAST_BYTES))
}

/// Available and all memory of the node, in bytes.
fn node() -> Option<(u64, u64)> {
    let mut text = [0; 1024];
    let text = sys::read_file(c"/proc/meminfo", &mut text)?;
    let bytes = |name| field(text, name)?.checked_mul(1024);
    Some((bytes(b"MemAvailable:")?, bytes(b"MemTotal:")?))
}

/// What the container's limit leaves, and the limit, in bytes. Files that are only cached leave
/// when their room is needed.
fn group() -> Option<(u64, u64)> {
    const UNIFIED: [&CStr; 3] = [
        c"/sys/fs/cgroup/memory.max",
        c"/sys/fs/cgroup/memory.current",
        c"/sys/fs/cgroup/memory.stat",
    ];
    const FIRST: [&CStr; 3] = [
        c"/sys/fs/cgroup/memory/memory.limit_in_bytes",
        c"/sys/fs/cgroup/memory/memory.usage_in_bytes",
        c"/sys/fs/cgroup/memory/memory.stat",
    ];
    let unified = sys::exists(UNIFIED[0]);
    let [limit, usage, stat] = if unified { UNIFIED } else { FIRST };
    let mut text = [0; 64];
    let limit = limit_of(sys::read_file(limit, &mut text)?)?;
    let usage = number(sys::read_file(usage, &mut text)?.trim_ascii())?;
    let mut text = [0; 8192];
    let text = sys::read_file(stat, &mut text)?;
    let name: &[u8] = if unified { b"inactive_file" } else { b"total_inactive_file" };
    let cached = field(text, name).unwrap_or(0);
    Some((limit.saturating_sub(usage.saturating_sub(cached)), limit))
}

/// `max` is no limit, as are the numbers that version 1 has for it: what counts then is the node.
fn limit_of(text: &[u8]) -> Option<u64> {
    match text.trim_ascii() {
        b"max" => Some(NO_LIMIT),
        text => number(text).map(|limit| limit.min(NO_LIMIT)),
    }
}

/// A pebibyte, of which an eighth is free on any node.
const NO_LIMIT: u64 = 1 << 50;

/// The number behind a name at the beginning of a line.
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
mod tests {
    use super::*;

    #[test]
    fn fields_are_whole_names_at_the_beginning_of_a_line() {
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
    fn this_machine_can_be_read() {
        let (room, all) = node().unwrap();
        assert!(0 < room && room < all);
    }
}
