//! `affinode policy`: what holds for each container and why; values of the node; whether a
//! configuration would be taken.

use std::{io::Write, path::PathBuf};

use affinode_proto::api::control::{PolicyChange, PolicyResponse, PolicyValue};

use super::{CliError, Output, client::Client, format, table};
use crate::{config::Config, core::explain::Value, report, schema};

/// Show policies and where each value comes from; set the node's; validate a file.
#[derive(Debug, clap::Args)]
pub struct Policy {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Print the effective policy of each container, value by value, and where each value
    /// comes from: default, node (file), namespace (rule), annotation, operator (command).
    Show(Show),
    /// Set values of the node's policy for good: a drop-in beside the configuration, which is
    /// checked before it is written.
    Set {
        /// As in the configuration: idle_timeout=90s mode=pressure.
        #[arg(required = true, value_name = "NAME=VALUE", value_parser = pair)]
        values: Vec<(String, String)>,
    },
    /// Take back values that were set.
    Unset {
        /// As in the configuration.
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Say whether a configuration file is valid, and the policies that it makes. Needs no
    /// controller; drop-ins beside the file and the environment count as they do for it.
    #[command(alias = "check")]
    Validate {
        /// The file.
        file: PathBuf,
    },
}

#[derive(Debug, Default, clap::Args)]
struct Show {
    /// Only this one: name, id or a prefix that only one has.
    container: Option<String>,
    /// How to print; wide names file, rule, annotation or command.
    #[arg(short, long, default_value = "table")]
    output: Option<Output>,
    /// Leave the header line out.
    #[arg(long)]
    no_headers: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.trim().is_empty() => {
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        }
        _ => Err("NAME=VALUE, such as idle_timeout=90s".into()),
    }
}

/// Runs what needs no controller; gives back what does.
pub fn alone(asked: Policy, out: &mut dyn Write) -> Result<Option<Policy>, CliError> {
    match asked.command {
        Some(Command::Validate { file }) => validate(&file, out).map(|()| None),
        command => Ok(Some(Policy { command })),
    }
}

/// Runs what needs the controller.
pub async fn run(client: &Client, out: &mut dyn Write, asked: Policy) -> Result<(), CliError> {
    let changes = match asked.command.unwrap_or_else(|| Command::Show(Show::default())) {
        Command::Show(asked) => return show(client, out, asked).await,
        Command::Validate { file } => return validate(&file, out),
        Command::Set { values } => values,
        Command::Unset { names } => names.into_iter().map(|n| (n, String::new())).collect(),
    };
    let change = |(name, value)| PolicyChange { name, value, ..PolicyChange::default() };
    let values = client.set_policy(changes.into_iter().map(change).collect()).await?;
    let rows: Vec<Vec<String>> = values.iter().map(|value| row("node", value, true)).collect();
    Ok(table::print(out, Some(&TITLES), &rows)?)
}

const TITLES: [&str; 5] = ["CONTAINER", "VALUE OF", "IS", "FROM", "NAMELY"];

async fn show(client: &Client, out: &mut dyn Write, asked: Show) -> Result<(), CliError> {
    let named = asked.container.is_some();
    let response = client.policy(asked.container.unwrap_or_default()).await?;
    let wide = match asked.output.unwrap_or(Output::Table) {
        Output::Json => {
            serde_json::to_writer_pretty(&mut *out, &schema::Policies::from(response))?;
            return Ok(writeln!(out)?);
        }
        Output::Yaml => {
            return Ok(serde_yaml_ng::to_writer(out, &schema::Policies::from(response))?);
        }
        output => output == Output::Wide,
    };
    let titles = if wide { &TITLES[..] } else { &TITLES[..4] };
    table::print(out, (!asked.no_headers).then_some(titles), &rows(&response, named, wide))?;
    for container in &response.containers {
        for warning in &container.warnings {
            let name = format::safe(&container.container);
            writeln!(out, "{name}: {}", format::safe(warning))?;
        }
    }
    Ok(())
}

fn rows(response: &PolicyResponse, named: bool, wide: bool) -> Vec<Vec<String>> {
    let node = response.node.iter().filter(|_| !named).map(|value| row("node", value, wide));
    let containers = response.containers.iter().flat_map(|c| {
        let name = format::safe(&c.container);
        c.values.iter().map(move |value| row(&name, value, wide))
    });
    node.chain(containers).collect()
}

fn row(whose: &str, value: &PolicyValue, wide: bool) -> Vec<String> {
    let mut cells = vec![
        whose.to_owned(),
        value.name.clone(),
        format::safe(&value.value),
        value.origin.clone(),
    ];
    if wide {
        cells.push(format::safe(&value.detail));
    }
    cells
}

fn validate(file: &std::path::Path, out: &mut dyn Write) -> Result<(), CliError> {
    if !file.exists() {
        return Err(CliError::NotDone(format!("no such file: {}", file.display())));
    }
    let config = Config::load(file).map_err(|e| CliError::NotDone(report::chain(&e)))?;
    let policies = config.settings().policies;
    writeln!(out, "{}: valid\n", file.display())?;
    let cells = |whose: &str, value: &Value| {
        let (origin, detail) = value.origin.words();
        [whose, value.name, &value.value, origin, detail].map(format::safe).to_vec()
    };
    let mut rows: Vec<Vec<String>> =
        policies.explain_node().iter().map(|value| cells("node", value)).collect();
    for rule in &policies.rules {
        let values = policies.explain(&rule.namespace, &Default::default());
        let own = values.iter().filter(|v| v.origin.words().0 == "namespace");
        rows.extend(own.map(|value| cells(&format!("namespace {}", rule.namespace), value)));
    }
    Ok(table::print(out, Some(&["POLICY OF", "VALUE OF", "IS", "FROM", "NAMELY"]), &rows)?)
}
