//! `affinode report`: prints the use of the GPUs over time, from the recorded history.

use std::{io::Write, path::Path, time::Duration};

use affinode_controller::{
    clock,
    config::Config,
    history::{SpanStore, StateSpan, StoreLimits},
    schema::{self, ReportRow},
};

use super::{
    CliError,
    client::ControlClient,
    report_table::{CSV_COLUMNS, Price, ReportTable, csv_line},
};

/// Print how GPUs were used: how much VRAM was requested, was in use, was held by idle containers,
/// and was freed by offloads, each in GPU hours. A GPU hour is the whole VRAM of a GPU for one hour,
/// or half of it for two hours. Requested is the VRAM limit of a container, for as long as the
/// container exists.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Length of the time range, which ends now: for example 90m, 24h or 7d.
    #[arg(long, default_value = "24h", value_parser = humantime::parse_duration)]
    since: Duration,
    /// What each line is: a container, a pod, a namespace (a team), or the resource claims of a
    /// container.
    #[arg(long, default_value = "container")]
    by: ReportGrouping,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: ReportFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
    /// Print again every minute, until interrupted.
    #[arg(short, long)]
    watch: bool,
}

/// Time between two prints with `--watch`.
const AGAIN: Duration = Duration::from_secs(60);

/// What each line of a report stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ReportGrouping {
    /// One line per container.
    Container,
    /// One line per pod.
    Pod,
    /// One line per namespace, which is the team of a container.
    #[value(alias = "team")]
    Namespace,
    /// One line per resource claim. A container with several claims has one line for all of them.
    Claim,
}

/// Format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum ReportFormat {
    /// Aligned columns for a terminal.
    Table,
    /// Further columns: requested and resident VRAM, CUDA calls, the share of resident VRAM that
    /// was idle, and the prices of requested, used, idle and resident VRAM.
    Wide,
    /// Comma-separated values, in GPU seconds.
    Csv,
    /// JSON, as GET /api/v1/report sends it.
    Json,
    /// YAML with the same names as in JSON.
    Yaml,
}

/// Prints the report once, or every minute with `--watch`.
pub async fn run(run_dir: &Path, out: &mut dyn Write, asked: ReportArgs) -> Result<(), CliError> {
    loop {
        print(run_dir, out, &asked).await?;
        if !asked.watch {
            return Ok(());
        }
        writeln!(out)?;
        out.flush()?;
        tokio::time::sleep(AGAIN).await;
    }
}

/// Requests the report from the controller and prints it. If no controller runs, the report is
/// computed from the history on disk.
async fn print(run_dir: &Path, out: &mut dyn Write, asked: &ReportArgs) -> Result<(), CliError> {
    let until_ms = clock::unix_ms();
    let back = i64::try_from(asked.since.as_millis()).unwrap_or(i64::MAX);
    let since_ms = until_ms.saturating_sub(back).max(0);
    let report = match ControlClient::connect(run_dir).await {
        Ok(client) => client.report(since_ms, until_ms).await?,
        Err(_) => from_disk(run_dir, since_ms, until_ms)?,
    };
    let mut report = schema::Report { since_unix_ms: since_ms, until_unix_ms: until_ms, ..report };
    report.rows = merge(report.rows, asked.by);
    match asked.output {
        ReportFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            Ok(writeln!(out)?)
        }
        ReportFormat::Yaml => Ok(serde_yaml_ng::to_writer(out, &report)?),
        ReportFormat::Csv => csv(out, &report, !asked.no_headers),
        ReportFormat::Table | ReportFormat::Wide => {
            let table = ReportTable {
                names: &[""],
                price: Price::of(&report),
                wide: asked.output == ReportFormat::Wide,
                headers: !asked.no_headers,
            };
            let named = |row| match asked.by {
                ReportGrouping::Claim => claim_name(row),
                _ => name(row),
            };
            let rows: Vec<_> = report.rows.iter().map(|row| (vec![named(row)], row)).collect();
            Ok(table.print(out, &rows)?)
        }
    }
}

fn from_disk(run_dir: &Path, since_ms: i64, until_ms: i64) -> Result<schema::Report, CliError> {
    let spans = spans_on_disk(run_dir, since_ms, until_ms)?;
    let sums = affinode_controller::history::UsageReport::sum(&spans, since_ms, until_ms);
    Ok(sums.priced(&Config::load(&Config::path())?.report))
}

/// Reads recorded spans of the history from the file on disk, to which the last controller wrote
/// them. The times are in milliseconds since 1970.
pub fn spans_on_disk(
    run_dir: &Path,
    since_ms: i64,
    until_ms: i64,
) -> Result<Vec<StateSpan>, CliError> {
    let config = Config::load(&Config::path())?;
    let file = config
        .history
        .folder(run_dir)
        .map(|folder| folder.join(affinode_controller::history::FILE));
    let Some(file) = file.filter(|file| file.exists()) else {
        return Err(CliError::NotDone(
            "no controller runs, and there is no history on disk; history.dir in the configuration \
             names the folder".into(),
        ));
    };
    let limits = StoreLimits { keep_ms: i64::MAX, max_bytes: u64::MAX };
    Ok(SpanStore::open(&file, limits)?.spans(since_ms, until_ms, None)?)
}

fn merge(rows: Vec<ReportRow>, by: ReportGrouping) -> Vec<ReportRow> {
    let mut merged: Vec<ReportRow> = Vec::new();
    for mut row in rows {
        if by != ReportGrouping::Container {
            row.container = String::new();
        }
        if matches!(by, ReportGrouping::Namespace | ReportGrouping::Claim) {
            row.pod = String::new();
        }
        if by == ReportGrouping::Namespace {
            row.claim = String::new();
        }
        let of_claim = by == ReportGrouping::Claim;
        let same = |known: &&mut ReportRow| {
            (&known.namespace, &known.pod, &known.container)
                == (&row.namespace, &row.pod, &row.container)
                && (!of_claim || known.claim == row.claim)
        };
        match merged.iter_mut().find(same) {
            Some(known) => known.add(&row),
            None => merged.push(row),
        }
    }
    merged.sort_by(|a, b| b.returned_gpu_seconds.total_cmp(&a.returned_gpu_seconds));
    merged
}

fn name(row: &ReportRow) -> String {
    let parts = [&row.namespace, &row.pod, &row.container];
    let parts: Vec<&str> =
        parts.into_iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
    super::format::safe(&parts.join("/"))
}

/// Returns the resource claims of a row as shown to users. Containers without a claim are one line
/// for each namespace.
fn claim_name(row: &ReportRow) -> String {
    match row.claim.is_empty() {
        true => format!("{} (no claim)", name(row)),
        false => super::format::safe(&row.claim),
    }
}

fn csv(out: &mut dyn Write, report: &schema::Report, headers: bool) -> Result<(), CliError> {
    if headers {
        writeln!(out, "{CSV_COLUMNS}")?;
    }
    let price = Price { per_gpu_hour: report.price_per_gpu_hour, currency: &report.currency };
    for row in &report.rows {
        writeln!(out, "{}", csv_line(row, Some(price)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pod: &str, container: &str, returned: f64) -> ReportRow {
        ReportRow {
            namespace: "ml".into(),
            pod: pod.into(),
            container: container.into(),
            used_gpu_seconds: 3600.0,
            returned_gpu_seconds: returned,
            requested_gpu_seconds: 9000.0,
            resident_gpu_seconds: 3600.0,
            calls: 7,
            ..ReportRow::default()
        }
    }

    fn report() -> schema::Report {
        schema::Report {
            price_per_gpu_hour: 2.0,
            currency: "EUR".into(),
            rows: vec![row("p", "a", 3600.0), row("p", "b", 7200.0)],
            ..schema::Report::default()
        }
    }

    fn show(out: &mut Vec<u8>, report: &schema::Report, headers: bool, wide: bool) {
        let price = Price::of(report);
        let rows: Vec<_> = report.rows.iter().map(|row| (vec![name(row)], row)).collect();
        ReportTable { names: &[""], price, wide, headers }.print(out, &rows).unwrap();
    }

    #[test]
    fn hours_and_prices_add_up() {
        let mut out = Vec::new();
        show(&mut out, &report(), true, false);
        let text = String::from_utf8(out).unwrap();
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last, ["all", "2.00", "0.00", "3.00", "0", "6.00"], "{text}");
    }

    #[test]
    fn wide_has_every_price() {
        let mut out = Vec::new();
        show(&mut out, &report(), true, true);
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("CUDA CALLS") && text.contains("HELD IDLE, EUR"), "{text}");
        let last: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        let expected = [
            "all", "2.00", "0.00", "3.00", "0", "5.00", "2.00", "0%", "14", "10.00", "4.00",
            "0.00", "4.00", "6.00",
        ];
        assert_eq!(last, expected, "{text}");
        let mut bare = Vec::new();
        show(&mut bare, &report(), false, true);
        assert_eq!(String::from_utf8(bare).unwrap().lines().count(), text.lines().count() - 1);
    }

    #[test]
    fn rows_are_summed_by_grouping() {
        assert_eq!(merge(report().rows, ReportGrouping::Container).len(), 2);
        let pods = merge(report().rows, ReportGrouping::Pod);
        assert_eq!((pods.len(), name(&pods[0])), (1, "ml/p".into()));
        assert_eq!(name(&merge(report().rows, ReportGrouping::Namespace)[0]), "ml");
    }

    #[test]
    fn rows_of_a_claim_are_summed() {
        let of = |claim: &str, pod: &str| ReportRow { claim: claim.into(), ..row(pod, "c", 60.0) };
        let rows = vec![of("ml/a", "p"), of("ml/b", "p"), of("ml/a", "q"), of("", "r")];
        let mut claims: Vec<_> = merge(rows, ReportGrouping::Claim)
            .iter()
            .map(|row| (claim_name(row), row.requested_gpu_seconds))
            .collect();
        claims.sort_by(|one, other| one.0.cmp(&other.0));
        let expected = [("ml (no claim)", 9000.0), ("ml/a", 18000.0), ("ml/b", 9000.0)];
        assert_eq!(claims, expected.map(|(name, seconds)| (name.to_owned(), seconds)));
    }

    #[test]
    fn team_is_another_word_for_namespace() {
        use clap::ValueEnum;
        assert_eq!(ReportGrouping::from_str("team", false), Ok(ReportGrouping::Namespace));
    }
}
