//! Goals for the speed of the engines on an H200. They are compared with the results of the suite's
//! run.

use super::report::Rows;

const TORCH: &str = "engines, torch";
const SMALL: &str = "engines, side by side";
const LARGE: &str = "engines, large";
const MEMORY: &str = "engines, memory";
const PINNED: &str = "a bare program, 60.0 GiB: pinned copy in";
const LARGE_WAKE: &str = "full, 60.0 GiB: wake";

/// Upper or lower bound that a goal sets for a measured value.
#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

/// Adds a row to `rows` for each goal whose value was measured in this run. `value` looks up a
/// measured value. Its arguments are the part of the suite, the value's name and the value's unit.
pub fn judge(value: impl Fn(&str, &str, &str) -> Option<f64>, rows: &mut Rows) {
    use Bound::{AtLeast, AtMost};
    let mut want = |what: &str, value: Option<f64>, unit: &'static str, bound: Bound| {
        let Some(value) = value else { return };
        let (words, limit, met) = match bound {
            AtMost(limit) => ("at most", limit, value <= limit),
            AtLeast(limit) => ("at least", limit, value >= limit),
        };
        rows.want(what, value, unit, &format!("{words} {limit:.0}"), met);
    };
    for (part, what, unit, bound) in [
        (TORCH, "full: wake, as the caller feels it", "ms", AtMost(550.0)),
        (TORCH, "full against checkpoint: wake", "times", AtLeast(7.0)),
        (TORCH, "prepared: offload", "ms", AtMost(850.0)),
        (TORCH, "prefaulted against checkpoint: offload", "times", AtLeast(12.0)),
        (LARGE, LARGE_WAKE, "GB/s", AtLeast(50.0)),
        (LARGE, "auto, 60.0 GiB: wake", "GB/s", AtLeast(52.0)),
    ] {
        let short = part.trim_start_matches("engines, ");
        want(&format!("{short}, {what}"), value(part, what, unit), unit, bound);
    }
    let share = |ours: Option<f64>, whole: Option<f64>| Some(ours? / whole? * 100.0);
    let of_pinned = share(value(LARGE, LARGE_WAKE, "GB/s"), value(LARGE, PINNED, "GB/s"));
    want("60 GiB: wake, of a pinned copy", of_pinned, "%", AtLeast(90.0));
    let large = |what: &str| value(LARGE, what, "ms");
    let again = share(large("kept, 60.0 GiB: offload"), large("kept, 60.0 GiB: first offload"));
    want("60 GiB: offload of what is kept, of the first", again, "%", AtMost(25.0));
    let kept = |what: &str| value("engines, torch inference", what, "ms");
    let again = share(kept("kept: offload"), kept("kept: first offload"));
    want("torch inference: offload of what is kept, of the first", again, "%", AtMost(25.0));
    let beyond = large("auto, 60.0 GiB: wake").zip(large(PINNED)).map(|(wake, copy)| wake - copy);
    let beyond = beyond.map(f64::round);
    want("auto, 60 GiB: wake beyond a pinned copy", beyond, "ms", AtMost(5.0));
    let small = |engine: &str| value(SMALL, &format!("{engine}, 1.0 GiB: wake"), "ms");
    let of_driver = share(small("full"), small("checkpoint"));
    want("1 GiB: wake, of the driver's", of_driver, "%", AtMost(100.0));
    for beside in ["", " beside others"] {
        for mib in ["2", "16", "128", "1024"] {
            let size = format!("{mib} MiB{beside}");
            let what = |whose: &str| format!("alloc and free of {size}, {whose}");
            let pair = |whose: &str| value(MEMORY, &what(whose), "us");
            let of_own = share(pair("swappable"), pair("driver"));
            want(&what("of the driver's"), of_own, "%", AtMost(100.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(found: &[(&str, &str, f64, &str)]) -> Rows {
        let mut rows = Rows::default();
        let value = |part: &str, what: &str, unit: &str| {
            found.iter().find(|row| (row.0, row.1, row.3) == (part, what, unit)).map(|row| row.2)
        };
        judge(value, &mut rows);
        rows
    }

    #[test]
    fn missing_figure_is_not_judged() {
        assert_eq!(judged(&[]).values().count(), 0);
        let goals = judged(&[(LARGE, LARGE_WAKE, 54.0, "GB/s")]);
        assert_eq!(goals.values().count(), 1, "not beside a pinned copy that is not there");
        assert!(goals.missed().is_empty());
    }

    #[test]
    fn goals_are_met_or_missed() {
        let goals = judged(&[
            (TORCH, "full: wake, as the caller feels it", 551.0, "ms"),
            (TORCH, "prefaulted against checkpoint: offload", 12.0, "times"),
            (LARGE, LARGE_WAKE, 49.0, "GB/s"),
            (LARGE, PINNED, 50.0, "GB/s"),
            (LARGE, PINNED, 1288.0, "ms"),
            (LARGE, "kept, 60.0 GiB: offload", 300.0, "ms"),
            (LARGE, "kept, 60.0 GiB: first offload", 3000.0, "ms"),
            (LARGE, "auto, 60.0 GiB: wake", 1300.0, "ms"),
            (SMALL, "full, 1.0 GiB: wake", 200.0, "ms"),
            (SMALL, "checkpoint, 1.0 GiB: wake", 400.0, "ms"),
            (MEMORY, "alloc and free of 2 MiB, driver", 50.0, "us"),
            (MEMORY, "alloc and free of 2 MiB, swappable", 51.0, "us"),
        ]);
        let values: Vec<f64> = goals.values().map(f64::round).collect();
        assert_eq!(values, [551.0, 12.0, 49.0, 98.0, 10.0, 12.0, 50.0, 102.0]);
        let missed = [
            "torch, full: wake, as the caller feels it: 551 ms, not at most 550",
            "large, full, 60.0 GiB: wake: 49 GB/s, not at least 50",
            "auto, 60 GiB: wake beyond a pinned copy: 12 ms, not at most 5",
            "alloc and free of 2 MiB, of the driver's: 102 %, not at most 100",
        ];
        assert_eq!(goals.missed(), missed);
    }
}
