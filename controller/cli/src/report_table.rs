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
            let held = row.used_gpu_seconds + row.idle_gpu_seconds;
            let idle = if held > 0.0 { 100.0 * row.idle_gpu_seconds / held } else { 0.0 };
            cells.extend([format!("{idle:.0}%"), row.calls.to_string()]);
        }
        if let Some(price) = self.price {
            let worth = |seconds: f64| format!("{:.2}", seconds / 3600.0 * price.per_gpu_hour);
            if self.wide {
                cells.extend([worth(row.used_gpu_seconds), worth(row.idle_gpu_seconds)]);
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
            titles.extend(["IDLE OF HELD".to_owned(), "CUDA CALLS".to_owned()]);
        }
        if let Some(price) = self.price {
            let currency = format::safe(price.currency);
            let priced = if self.wide { &["IN USE", "HELD IDLE", "FREED"][..] } else { &["FREED"] };
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

/// Names of the CSV columns that [`csv_line`] writes.
pub const CSV_COLUMNS: &str = "namespace,pod,container,used_gpu_seconds,idle_gpu_seconds,returned_gpu_seconds,offloads,calls,returned_price,currency";

/// Formats a row as comma-separated values. Without a price, the fields for price and currency are
/// empty.
#[must_use]
pub fn csv_line(row: &ReportRow, price: Option<Price<'_>>) -> String {
    let worth = price.map(|price| row.returned_gpu_seconds / 3600.0 * price.per_gpu_hour);
    format!(
        "{},{},{},{:.3},{:.3},{:.3},{},{},{},{}",
        field(&row.namespace),
        field(&row.pod),
        field(&row.container),
        row.used_gpu_seconds,
        row.idle_gpu_seconds,
        row.returned_gpu_seconds,
        row.offloads,
        row.calls,
        worth.map(|worth| format!("{worth:.4}")).unwrap_or_default(),
        field(price.map_or("", |price| price.currency)),
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
    fn a_hostile_name_stays_one_field() {
        assert_eq!(field("=1+1"), "\"'=1+1\"");
        assert_eq!(field("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
