//! `affinode calls`: which CUDA function each process called last, and how often it
//! calls. Read from the counters that the processes keep anyway: looking costs them
//! nothing, and single calls between two looks are counted and not named.

use std::{collections::HashMap, io::Write, time::Duration};

use super::{CliError, client::Client, format, table};
use crate::schema;

/// Show each CUDA process's last call and call rate, every second.
#[derive(Debug, clap::Args)]
pub struct Calls {
    /// Containers whose names contain this; all when left out.
    filter: Option<String>,
    /// Look twice, print once, end.
    #[arg(long)]
    once: bool,
    /// Leave the header line out.
    #[arg(long)]
    no_headers: bool,
}

const TITLES: [&str; 7] =
    ["CONTAINER", "PID", "PROGRAM", "CALLS/S", "CALLS", "IN PROGRESS", "LAST CALL"];

pub async fn run(client: &Client, out: &mut dyn Write, asked: Calls) -> Result<(), CliError> {
    let mut before = counts(&schema::Node::from(client.list().await?));
    loop {
        let began = std::time::Instant::now();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let node = schema::Node::from(client.list().await?);
        let seconds = began.elapsed().as_secs_f64();
        let rows = rows(&node, &before, seconds, asked.filter.as_deref().unwrap_or_default());
        table::print(out, (!asked.no_headers).then_some(&TITLES), &rows)?;
        if asked.once {
            return Ok(());
        }
        writeln!(out)?;
        before = counts(&node);
    }
}

fn counts(node: &schema::Node) -> HashMap<u32, u64> {
    node.containers.iter().flat_map(|c| &c.processes).map(|p| (p.pid, p.calls)).collect()
}

fn rows(
    node: &schema::Node,
    before: &HashMap<u32, u64>,
    seconds: f64,
    filter: &str,
) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for container in node.containers.iter().filter(|c| c.name.contains(filter)) {
        for p in &container.processes {
            let more = p.calls.saturating_sub(before.get(&p.pid).copied().unwrap_or(p.calls));
            #[allow(clippy::cast_precision_loss)] // A rate.
            let rate = more as f64 / seconds;
            rows.push(vec![
                format::safe(&container.name),
                p.pid.to_string(),
                format::safe(&p.command),
                format!("{rate:.0}"),
                p.calls.to_string(),
                p.inflight.to_string(),
                if p.last_call.is_empty() { "-".into() } else { p.last_call.clone() },
            ]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_what_came_in_the_time_between() {
        let process = schema::Process {
            pid: 7,
            calls: 300,
            last_call: "cuLaunchKernel".into(),
            ..schema::Process::default()
        };
        let container = schema::Container {
            name: "ml/a".into(),
            processes: vec![process],
            ..Default::default()
        };
        let node = schema::Node { containers: vec![container], ..Default::default() };
        let shown = rows(&node, &HashMap::from([(7, 100)]), 2.0, "ml");
        assert_eq!(shown[0][3..], ["100", "300", "0", "cuLaunchKernel"]);
        assert!(rows(&node, &HashMap::new(), 1.0, "other").is_empty());
    }
}
