//! Converts metrics to the older Prometheus text format, for clients that do not request
//! OpenMetrics. In the older format, a counter's family has the same name as its samples, with
//! `_total`. The format has no units and no end mark.

use std::fmt::Write as _;

/// Converts OpenMetrics text to the older Prometheus text format.
#[must_use]
pub fn classic(openmetrics: &str) -> String {
    let counters: Vec<&str> = openmetrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut text = String::with_capacity(openmetrics.len());
    for line in openmetrics.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let about = line.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        let renamed = about.and_then(|(what, rest)| {
            let (name, more) = rest.split_once(' ')?;
            counters.contains(&name).then(|| format!("# {what} {name}_total {more}"))
        });
        let _ = writeln!(text, "{}", renamed.as_deref().unwrap_or(line));
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn counters_are_named_as_their_samples() {
        let open = "# HELP a_x What.\n# TYPE a_x counter\n# UNIT a_x bytes\na_x_total 1\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected =
            "# HELP a_x_total What.\n# TYPE a_x_total counter\na_x_total 1\n# TYPE b gauge\nb 2\n";
        assert_eq!(super::classic(open), expected);
    }
}
