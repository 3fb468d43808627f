//! What the engine `fast` is to reach on an H200, against what this run has found.

use super::report::Found;

const TORCH: &str = "engines, torch";
const SMALL: &str = "engines, side by side";
const LARGE: &str = "engines, large";
const MEMORY: &str = "engines, memory";

/// A goal: what it is of, and how far it was reached, where the run has found that out.
pub struct Goal {
    /// What is measured.
    pub what: String,
    /// How much it is.
    pub value: f64,
    /// Of what.
    pub unit: &'static str,
    /// What it is to be.
    pub goal: String,
    /// Whether it is.
    pub met: bool,
}

/// The goals that a run says something about.
pub fn judge(found: &impl Found) -> Vec<Goal> {
    let at_most = |what: &str, value: Option<f64>, unit, most: f64| {
        value.map(|value| Goal {
            what: what.into(),
            value,
            unit,
            goal: format!("at most {most:.0}"),
            met: value <= most,
        })
    };
    let at_least = |what: &str, value: Option<f64>, unit, least: f64| {
        value.map(|value| Goal {
            what: what.into(),
            value,
            unit,
            goal: format!("at least {least:.0}"),
            met: value >= least,
        })
    };
    let torch = |what: &str, unit| found.value(TORCH, what, unit);
    let large = |what: &str| found.value(LARGE, what, "GB/s");
    let of_pinned = large("fast, 60.0 GiB: wake")
        .zip(found.value(MEMORY, "pinned copy in", "GB/s"))
        .map(|(wake, pinned)| wake / pinned * 100.0);
    let small = |engine: &str| found.value(SMALL, &format!("{engine}, 1.0 GiB: wake"), "ms");
    let of_driver = small("fast").zip(small("driver")).map(|(fast, driver)| fast / driver * 100.0);
    let fixed = [
        at_most("torch: wake", torch("fast: wake, as the caller feels it", "ms"), "ms", 550.0),
        at_least("torch: wake, faster", torch("fast against driver: wake", "times"), "times", 7.0),
        at_most("torch: offload", torch("fast: offload", "ms"), "ms", 850.0),
        at_least(
            "torch: offload, faster",
            torch("fast against driver: offload", "times"),
            "times",
            12.0,
        ),
        at_least("60 GiB: wake", large("fast, 60.0 GiB: wake"), "GB/s", 50.0),
        at_least("60 GiB: wake, of a pinned copy", of_pinned, "%", 90.0),
        at_least("60 GiB: wake from park", large("park, 60.0 GiB: wake"), "GB/s", 52.0),
        at_most("1 GiB: wake, of the driver's", of_driver, "%", 100.0),
    ];
    let pairs = ["2", "16", "128", "1024"].into_iter().map(|mib| {
        let pair = |whose: &str| {
            found.value(MEMORY, &format!("alloc and free of {mib} MiB, {whose}"), "us")
        };
        let of_own = pair("carried").zip(pair("driver")).map(|(ours, own)| ours / own * 100.0);
        at_most(&format!("{mib} MiB: alloc and free, of the driver's"), of_own, "%", 100.0)
    });
    fixed.into_iter().chain(pairs).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rows(Vec<(&'static str, &'static str, f64, &'static str)>);

    impl Found for Rows {
        fn value(&self, part: &str, what: &str, unit: &str) -> Option<f64> {
            let is = |row: &&(&str, &str, f64, &str)| (row.0, row.1, row.3) == (part, what, unit);
            self.0.iter().find(is).map(|row| row.2)
        }
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        assert!(judge(&Rows(Vec::new())).is_empty());
        let alone = [(LARGE, "fast, 60.0 GiB: wake", 54.0, "GB/s")];
        let goals = judge(&Rows(alone.to_vec()));
        assert_eq!(goals.len(), 1, "not beside a pinned copy that is not there");
        assert!(goals[0].met);
    }

    #[test]
    fn goals_are_met_or_missed() {
        let rows = [
            (TORCH, "fast: wake, as the caller feels it", 551.0, "ms"),
            (TORCH, "fast against driver: offload", 12.0, "times"),
            (LARGE, "fast, 60.0 GiB: wake", 49.0, "GB/s"),
            (MEMORY, "pinned copy in", 50.0, "GB/s"),
            (SMALL, "fast, 1.0 GiB: wake", 200.0, "ms"),
            (SMALL, "driver, 1.0 GiB: wake", 400.0, "ms"),
            (MEMORY, "alloc and free of 2 MiB, driver", 50.0, "us"),
            (MEMORY, "alloc and free of 2 MiB, carried", 51.0, "us"),
        ];
        let goals = judge(&Rows(rows.to_vec()));
        let seen: Vec<_> = goals.iter().map(|goal| (goal.value, goal.met)).collect();
        let expected = [
            (551.0, false),
            (12.0, true),
            (49.0, false),
            (98.0, true),
            (50.0, true),
            (102.0, false),
        ];
        assert_eq!(seen, expected);
    }
}
