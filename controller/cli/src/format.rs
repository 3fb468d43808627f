//! Formats numbers, sizes and times as text for display.

/// Formats a size in bytes: `-` for 0, MiB below 10 GiB, otherwise GiB.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    match bytes {
        0 => "-".into(),
        b if b < 10 * GIB => format!("{} MiB", b >> 20),
        b => format!("{}.{} GiB", b / GIB, b % GIB * 10 / GIB),
    }
}

/// Formats the size of offloaded memory: the part in host memory, and the part on disk if there is
/// one, such as `8192 MiB, on disk 16.0 GiB`. Both sizes are in bytes. `disk_bytes` is a part of
/// `offloaded_bytes`.
#[must_use]
pub fn offloaded(offloaded_bytes: u64, disk_bytes: u64) -> String {
    let in_memory = offloaded_bytes.saturating_sub(disk_bytes);
    match (in_memory, disk_bytes) {
        (_, 0) => bytes(in_memory),
        (0, _) => format!("on disk {}", bytes(disk_bytes)),
        _ => format!("{}, on disk {}", bytes(in_memory), bytes(disk_bytes)),
    }
}

/// Formats a rate per second, such as `0`, `0.5`, `12.0`, `340`, `33300`.
#[must_use]
pub fn rate(per_second: f64) -> String {
    if per_second > 0.0 && per_second < 100.0 {
        format!("{per_second:.1}")
    } else {
        format!("{per_second:.0}")
    }
}

/// Formats a size in bytes with a suitable unit, such as `12 B`, `4.0 KiB`, `1.5 GiB`.
#[must_use]
pub fn amount(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut shown = bytes as f64 / 1024.0;
    let mut unit = 0;
    while shown >= 1024.0 && unit + 1 < UNITS.len() {
        shown /= 1024.0;
        unit += 1;
    }
    format!("{shown:.1} {}", UNITS[unit])
}

/// Formats a duration in milliseconds, such as `0.5s`, `12s`, `4m10s`, `3h02m`, `5d04h`.
#[must_use]
pub fn duration(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0..=9 => format!("{}.{}s", s, ms % 1000 / 100),
        10..=59 => format!("{s}s"),
        60..=3599 => format!("{}m{:02}s", s / 60, s % 60),
        3600..=86_399 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Makes text from a container safe for a terminal by replacing control characters with `?`.
#[must_use]
pub fn safe(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Formats the time of day in UTC as `HH:MM:SS.mmm`.
#[must_use]
pub fn clock(unix_ms: i64) -> String {
    let ms = unix_ms.rem_euclid(86_400_000);
    format!("{:02}:{:02}:{:02}.{:03}", ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000)
}

/// Formats the date in UTC as `YYYY-MM-DD`.
#[must_use]
pub fn date(unix_ms: i64) -> String {
    let since = std::time::Duration::from_millis(unix_ms.max(0).cast_unsigned());
    let text = humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + since).to_string();
    text.chars().take(10).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!([bytes(0), bytes(600 << 20), bytes(24 << 30)], ["-", "600 MiB", "24.0 GiB"]);
        let shown = [500, 12_000, 250_000, 10_920_000, 446_400_000].map(duration);
        assert_eq!(shown, ["0.5s", "12s", "4m10s", "3h02m", "5d04h"]);
        assert_eq!([12, 4096, 3 << 29].map(amount), ["12 B", "4.0 KiB", "1.5 GiB"]);
        assert_eq!([0.0, 0.5, 340.2].map(rate), ["0", "0.5", "340"]);
        assert_eq!(clock(1_000 * 3_661 + 7), "01:01:01.007");
        assert_eq!(date(1_700_000_000_000), "2023-11-14");
        assert_eq!(safe("a\x1b[2Jb"), "a?[2Jb");
    }
}
