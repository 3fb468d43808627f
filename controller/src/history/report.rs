//! Computes the report on the use of the GPUs. For each container, it sums up the container's spans
//! in a time range.

use std::collections::BTreeMap;

use super::StateSpan;
use crate::{config::ReportSection, schema};

/// Use of the GPUs by one container in a time range. A GPU second is the VRAM of a whole GPU for
/// one second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UsageRow {
    /// Namespace of Kubernetes, or of containerd outside Kubernetes.
    pub namespace: String,
    /// Name of the pod. Empty outside Kubernetes.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// VRAM that the container held while it was in use or was moved, in GPU seconds.
    pub used_gpu_seconds: f64,
    /// VRAM that the container held while it was idle, in GPU seconds.
    pub idle_gpu_seconds: f64,
    /// VRAM that offloads of the container freed, in GPU seconds.
    pub returned_gpu_seconds: f64,
    /// Number of offloads that were begun.
    pub offloads: u64,
    /// Number of CUDA calls of the container.
    pub calls: u64,
    /// ResourceClaims of the container, as `namespace/name`, separated by commas. Empty: it has
    /// none.
    pub claim: String,
    /// VRAM that the container could use at most under its limit, in GPU seconds.
    pub requested_gpu_seconds: f64,
}

/// Use of the GPUs by all containers in a time range.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UsageReport {
    /// Start of the time range, in milliseconds since 1970.
    pub since_ms: i64,
    /// End of the time range, in milliseconds since 1970.
    pub until_ms: i64,
    /// Start of the oldest span, in milliseconds since 1970. `None` if there is no span.
    pub oldest_ms: Option<i64>,
    /// One row for each container, in order of name. A container whose claims changed has a row for
    /// each of them.
    pub rows: Vec<UsageRow>,
}

impl UsageReport {
    /// Sums up the spans for each container. Only the part of a span that is inside the time range
    /// counts.
    #[must_use]
    pub fn sum(spans: &[StateSpan], since_ms: i64, until_ms: i64) -> UsageReport {
        let mut rows: BTreeMap<[&str; 4], UsageRow> = BTreeMap::new();
        for span in spans {
            let share = span.share(since_ms, until_ms);
            let name = [&span.namespace, &span.pod, &span.container, &span.claim];
            let name = name.map(String::as_str);
            let row = rows.entry(name).or_insert_with(|| UsageRow {
                namespace: span.namespace.clone(),
                pod: span.pod.clone(),
                container: span.container.clone(),
                claim: span.claim.clone(),
                ..UsageRow::default()
            });
            let held = span.held_gpu_seconds * share;
            if span.state == "Idle" {
                row.idle_gpu_seconds += held;
            } else {
                row.used_gpu_seconds += held;
            }
            row.returned_gpu_seconds += span.offloaded_gpu_seconds * share;
            row.requested_gpu_seconds += span.requested_gpu_seconds * share;
            row.offloads += u64::from(span.state == "Offloading" && span.from_ms >= since_ms);
            if share > 0.5 {
                row.calls = row.calls.saturating_add(span.calls);
            }
        }
        UsageReport {
            since_ms,
            until_ms,
            oldest_ms: spans.iter().map(|span| span.from_ms).min(),
            rows: rows.into_values().collect(),
        }
    }

    /// Converts the report to the form that users read, with the configured prices.
    #[must_use]
    pub fn priced(self, prices: &ReportSection) -> schema::Report {
        let row = |row: UsageRow| schema::ReportRow {
            namespace: row.namespace,
            pod: row.pod,
            container: row.container,
            used_gpu_seconds: row.used_gpu_seconds,
            idle_gpu_seconds: row.idle_gpu_seconds,
            returned_gpu_seconds: row.returned_gpu_seconds,
            offloads: row.offloads,
            calls: row.calls,
            claim: row.claim,
            requested_gpu_seconds: row.requested_gpu_seconds,
            resident_gpu_seconds: row.used_gpu_seconds + row.idle_gpu_seconds,
        };
        schema::Report {
            since_unix_ms: self.since_ms,
            until_unix_ms: self.until_ms,
            oldest_unix_ms: self.oldest_ms,
            price_per_gpu_hour: prices.price_per_gpu_hour,
            currency: prices.currency.clone(),
            rows: self.rows.into_iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(
        container: &str,
        state: &str,
        from_ms: i64,
        to_ms: i64,
        held: f64,
        offloaded: f64,
    ) -> StateSpan {
        StateSpan {
            container: container.into(),
            state: state.into(),
            from_ms,
            to_ms,
            held_gpu_seconds: held,
            offloaded_gpu_seconds: offloaded,
            ..StateSpan::default()
        }
    }

    #[test]
    fn spans_count_by_their_part_in_the_range() {
        let spans = [
            span("a", "Active", 0, 10_000, 10.0, 0.0),
            span("a", "Idle", 10_000, 20_000, 5.0, 0.0),
            span("a", "Offloading", 20_000, 20_100, 0.0, 0.0),
            span("a", "Offloaded", 20_100, 40_100, 0.0, 20.0),
            span("b", "Active", 0, 10_000, 1.0, 0.0),
        ];
        let report = UsageReport::sum(&spans, 5_000, 30_100);
        let a = &report.rows[0];
        assert!((a.used_gpu_seconds - 5.0).abs() < 1e-9, "{a:?}");
        assert!((a.idle_gpu_seconds - 5.0).abs() < 1e-9, "{a:?}");
        assert!((a.returned_gpu_seconds - 10.0).abs() < 1e-9, "{a:?}");
        assert_eq!((a.offloads, report.rows.len(), report.oldest_ms), (1, 2, Some(0)));
    }

    #[test]
    fn claims_of_a_container_have_rows() {
        let of = |claim: &str, from_ms| StateSpan {
            claim: claim.into(),
            requested_gpu_seconds: 4.0,
            ..span("a", "Active", from_ms, from_ms + 10_000, 3.0, 0.0)
        };
        let spans = [of("ml/x", 0), of("ml/y", 10_000), of("ml/y", 20_000)];
        let report = UsageReport::sum(&spans, 5_000, 40_000).priced(&ReportSection::default());
        let rows: Vec<_> = report
            .rows
            .iter()
            .map(|row| (row.claim.as_str(), row.requested_gpu_seconds, row.resident_gpu_seconds))
            .collect();
        assert_eq!(rows, [("ml/x", 2.0, 1.5), ("ml/y", 8.0, 6.0)]);
    }
}
