//! Tables and CSV fields of a report, shared by `affinode report` and `kubectl affinode report`.

use std::io::{self, Write};

use affinode_controller::schema::{self, ReportRow};

use super::{format, table};

/// Price of a GPU hour, which a report uses to compute costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price<'a> {
    /// Price of a whole GPU for one hour.
    pub per_gpu_hour: f64,
    /// Currency of the price.
    pub currency: &'a str,
}

impl<'a> Price<'a> {
    /// Returns the price of a GPU hour in a report. `None`: no price is configured.
    #[must_use]
    pub fn of(report: &'a schema::Report) -> Option<Price<'a>> {
        let price = Price { per_gpu_hour: report.price_per_gpu_hour, currency: &report.currency };
        (price.per_gpu_hour > 0.0).then_some(price)
    }
}

/// A table of GPU hours, for a terminal.
#[derive(Clone, Copy, Debug)]
pub struct ReportTable<'a> {
    /// Titles of the first columns, which contain the names of a row.
    pub names: &'a [&'a str],
    /// Price of a GPU hour. `None`: the table has no prices.
    pub price: Option<Price<'a>>,
    /// Whether the table has the additional columns of the format `wide`.
    pub wide: bool,
    /// Whether the table has a header line.
    pub headers: bool,
}

impl ReportTable<'_> {
    /// Prints the rows, each with its names, and at the end the sum of all rows.
    ///
    /// # Errors
    /// If the output cannot be written.
    pub fn print(&self, out: &mut dyn Write, rows: &[(Vec<String>, &ReportRow)]) -> io::Result<()> {
        if rows.is_empty() {
            return writeln!(out, "no container held or freed VRAM in this time range");
        }
        let mut all = ReportRow::default();
        let mut lines = Vec::new();
        for (names, row) in rows {
            all.add(row);
            lines.push([names.clone(), self.figures(row)].concat());
        }
        let mut names = vec![String::new(); self.names.len().max(1)];
        names[0] = "all".into();
        lines.push([names, self.figures(&all)].concat());
        let titles = self.titles();
        let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
        table::print(out, self.headers.then_some(&titles), &lines)
    }

    fn figures(&self, row: &ReportRow) -> Vec<String> {
        let mut cells = vec![
            hours(row.used_gpu_seconds),
            hours(row.idle_gpu_seconds),
            hours(row.returned_gpu_seconds),
            row.offloads.to_string(),
        ];
        if self.wide {
            let held = row.resident_gpu_seconds;
            let idle = if held > 0.0 { 100.0 * row.idle_gpu_seconds / held } else { 0.0 };
            cells.extend([hours(row.requested_gpu_seconds), hours(held)]);
            cells.extend([format!("{idle:.0}%"), row.calls.to_string()]);
        }
        if let Some(price) = self.price {
            let worth = |seconds: f64| format!("{:.2}", seconds / 3600.0 * price.per_gpu_hour);
            if self.wide {
                let held = [row.used_gpu_seconds, row.idle_gpu_seconds, row.resident_gpu_seconds];
                cells.push(worth(row.requested_gpu_seconds));
                cells.extend(held.map(worth));
            }
            cells.push(worth(row.returned_gpu_seconds));
        }
        cells
    }

    fn titles(&self) -> Vec<String> {
        let figures = ["GPU HOURS IN USE", "HELD IDLE", "FREED", "OFFLOADS"];
        let mut titles: Vec<String> =
            self.names.iter().chain(&figures).map(|&title| title.to_owned()).collect();
        if self.wide {
            let more = ["REQUESTED", "RESIDENT", "IDLE OF RESIDENT", "CUDA CALLS"];
            titles.extend(more.map(str::to_owned));
        }
        if let Some(price) = self.price {
            let currency = format::safe(price.currency);
            let all = ["REQUESTED", "IN USE", "HELD IDLE", "RESIDENT", "FREED"];
            let priced = if self.wide { &all[..] } else { &["FREED"] };
            titles.extend(priced.iter().map(|what| format!("{what}, {currency}")));
        }
        titles
    }
}

/// Converts GPU seconds to GPU hours, as text with two decimals. A value below 0.1 has four
/// decimals.
fn hours(seconds: f64) -> String {
    match seconds / 3600.0 {
        hours if hours != 0.0 && hours < 0.1 => format!("{hours:.4}"),
        hours => format!("{hours:.2}"),
    }
}

/// Names of the CSV columns that [`csv_line`] writes. New columns are added at the end, so that
/// programs that read columns by their position continue to work.
pub const CSV_COLUMNS: &str = "namespace,pod,container,used_gpu_seconds,idle_gpu_seconds,returned_gpu_seconds,offloads,calls,returned_price,currency,requested_gpu_seconds,resident_gpu_seconds,requested_price,used_price,resident_price,claim";

/// Formats a row as comma-separated values. Without a price, the fields for prices and currency are
/// empty.
#[must_use]
pub fn csv_line(row: &ReportRow, price: Option<Price<'_>>) -> String {
    let worth = |seconds: f64| match price {
        Some(price) => format!("{:.4}", seconds / 3600.0 * price.per_gpu_hour),
        None => String::new(),
    };
    format!(
        "{},{},{},{:.3},{:.3},{:.3},{},{},{},{},{:.3},{:.3},{},{},{},{}",
        field(&row.namespace),
        field(&row.pod),
        field(&row.container),
        row.used_gpu_seconds,
        row.idle_gpu_seconds,
        row.returned_gpu_seconds,
        row.offloads,
        row.calls,
        worth(row.returned_gpu_seconds),
        field(price.map_or("", |price| price.currency)),
        row.requested_gpu_seconds,
        row.resident_gpu_seconds,
        worth(row.requested_gpu_seconds),
        worth(row.used_gpu_seconds),
        worth(row.resident_gpu_seconds),
        field(&row.claim),
    )
}

/// Formats a text as a CSV field that a spreadsheet reads as one text, neither as a formula nor as
/// several fields.
pub fn field(text: &str) -> String {
    let safe = format::safe(text);
    let formula = safe.starts_with(['=', '+', '-', '@']);
    if formula || safe.contains([',', '"']) {
        format!("\"{}{}\"", if formula { "'" } else { "" }, safe.replace('"', "\"\""))
    } else {
        safe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_line_has_a_field_for_each_column() {
        let row = ReportRow {
            namespace: "ml".into(),
            used_gpu_seconds: 3600.0,
            resident_gpu_seconds: 7200.0,
            requested_gpu_seconds: 10_800.0,
            claim: "ml/a,ml/b".into(),
            ..ReportRow::default()
        };
        let price = Price { per_gpu_hour: 2.0, currency: "EUR" };
        let line = csv_line(&row, Some(price));
        let end = ",EUR,10800.000,7200.000,6.0000,2.0000,4.0000,\"ml/a,ml/b\"";
        assert!(line.starts_with("ml,,,3600.000,") && line.ends_with(end), "{line}");
        let bare = csv_line(&ReportRow::default(), None);
        assert_eq!(bare.split(',').count(), CSV_COLUMNS.split(',').count(), "{bare}");
    }

    #[test]
    fn a_hostile_name_stays_one_field() {
        assert_eq!(field("=1+1"), "\"'=1+1\"");
        assert_eq!(field("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
