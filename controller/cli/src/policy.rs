//! `affinode policy`: shows the effective policy of each container with the source of each value,
//! sets values of the node, and validates a configuration.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use affinode_controller::{config::Config, error_chain, schema};
use affinode_core::explain::Value;
use affinode_proto::api::control::{PolicyChange, PolicyResponse, PolicyValue};
use serde_json::json;

use super::{CliError, OutputFormat, client::ControlClient, events, format, say, table};

/// Show the policy of each container and the source of each value. Subcommands also set values of
/// the node and validate a configuration file.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct PolicyArgs {
    #[command(subcommand)]
    command: Option<PolicyCommand>,
    #[command(flatten)]
    all: PrintedPolicy,
}

#[derive(Debug, clap::Subcommand)]
enum PolicyCommand {
    /// Print the policy of each container: each value with its source. The sources are: default
    /// (built in), node (a configuration file), namespace (a rule for the container's namespace),
    /// annotation (of the container) and operator (a command such as `affinode pin`).
    Show(ShowArgs),
    /// Set values of the node's policy permanently. The values are validated first, then written
    /// into a file in the folder conf.d next to the configuration file.
    Set {
        /// Keys of `[policy]` with their values, as in the configuration: for example
        /// idle_timeout=90s mode=pressure.
        #[arg(required = true, value_name = "NAME=VALUE", value_parser = pair)]
        values: Vec<(String, String)>,
        #[command(flatten)]
        shape: PolicyShape,
    },
    /// Remove values that `affinode policy set` has set.
    Unset {
        /// Keys of `[policy]`, as in the configuration.
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        shape: PolicyShape,
    },
    /// Check whether a configuration file is valid, and print the resulting policies. The files in
    /// the folder conf.d next to the file, and environment variables, apply as well. The command
    /// needs no controller. To see which effect the file would have had in the past, run `affinode
    /// simulate --history --config FILE`.
    #[command(alias = "check")]
    Validate {
        /// Configuration file to check.
        file: PathBuf,
        #[command(flatten)]
        shape: PolicyShape,
    },
}

#[derive(Debug, clap::Args)]
struct ShowArgs {
    /// Only this container: its name, its id, or a unique prefix of either.
    container: Option<String>,
    #[command(flatten)]
    printed: PrintedPolicy,
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct PolicyShape {
    /// Output format. wide adds the file, rule, annotation or command from which each value comes.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Do not print the header line.
    #[arg(long)]
    no_headers: bool,
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct PrintedPolicy {
    #[command(flatten)]
    shape: PolicyShape,
    /// Print again after each event.
    #[arg(short, long)]
    watch: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.trim().is_empty() => {
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        }
        _ => Err("expected NAME=VALUE, such as idle_timeout=90s".into()),
    }
}

/// Runs a command that needs no controller, and returns `None`. Returns a command that needs a
/// controller unchanged, because the caller must first connect to the controller.
pub fn alone(asked: PolicyArgs, out: &mut dyn Write) -> Result<Option<PolicyArgs>, CliError> {
    match asked.command {
        Some(PolicyCommand::Validate { file, shape }) => validate(&file, out, shape).map(|()| None),
        command => Ok(Some(PolicyArgs { command, ..asked })),
    }
}

/// Runs a command that needs the controller.
pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: PolicyArgs,
) -> Result<(), CliError> {
    let all = PolicyCommand::Show(ShowArgs { container: None, printed: asked.all });
    let (changes, shape) = match asked.command.unwrap_or(all) {
        PolicyCommand::Show(asked) => return show(client, out, asked).await,
        PolicyCommand::Validate { file, shape } => return validate(&file, out, shape),
        PolicyCommand::Set { values, shape } => (values, shape),
        PolicyCommand::Unset { names, shape } => {
            (names.into_iter().map(|name| (name, String::new())).collect(), shape)
        }
    };
    let change = |(name, value)| PolicyChange { name, value, ..PolicyChange::default() };
    let node = client.set_policy(changes.into_iter().map(change).collect()).await?;
    print(out, PolicyResponse { node, ..PolicyResponse::default() }, shape, false)
}

const TITLES: [&str; 5] = ["CONTAINER", "VALUE OF", "IS", "FROM", "NAMELY"];

async fn show(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: ShowArgs,
) -> Result<(), CliError> {
    let named = asked.container.is_some();
    let mut last = None;
    loop {
        let response = client.policy(asked.container.clone().unwrap_or_default()).await?;
        print(out, response, asked.printed.shape, named)?;
        if !asked.printed.watch {
            return Ok(());
        }
        writeln!(out)?;
        last = Some(events::next(client, last).await?);
    }
}

fn print(
    out: &mut dyn Write,
    response: PolicyResponse,
    shape: PolicyShape,
    named: bool,
) -> Result<(), CliError> {
    let wide = match shape.output {
        OutputFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &schema::Policies::from(response))?;
            return Ok(writeln!(out)?);
        }
        OutputFormat::Yaml => {
            return Ok(serde_yaml_ng::to_writer(out, &schema::Policies::from(response))?);
        }
        output => output == OutputFormat::Wide,
    };
    let titles = if wide { &TITLES[..] } else { &TITLES[..4] };
    table::print(out, (!shape.no_headers).then_some(titles), &rows(&response, named, wide))?;
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

fn validate(file: &Path, out: &mut dyn Write, shape: PolicyShape) -> Result<(), CliError> {
    if !file.exists() {
        return Err(CliError::NotDone(format!(
            "the configuration file {} does not exist",
            file.display()
        )));
    }
    let config = Config::load(file).map_err(|e| CliError::NotDone(error_chain::chain(&e)))?;
    let policies = config.settings().policies;
    let values = |values: &[Value]| -> Vec<schema::PolicyValue> {
        let value = |value: &Value| {
            let (origin, detail) = value.origin.words();
            let (name, is) = (value.name.into(), value.value.clone());
            schema::PolicyValue { name, value: is, origin: origin.into(), detail: detail.into() }
        };
        values.iter().map(value).collect()
    };
    let node = values(&policies.explain_node());
    let namespaces: Vec<_> = policies
        .rules
        .iter()
        .map(|rule| {
            let all = values(&policies.explain(&rule.name, &Default::default()));
            let own = all.into_iter().filter(|value| value.origin == "namespace");
            (rule.name.clone(), own.collect::<Vec<_>>())
        })
        .collect();
    if matches!(shape.output, OutputFormat::Json | OutputFormat::Yaml) {
        let namespaces: std::collections::BTreeMap<_, _> = namespaces.into_iter().collect();
        let all = json!({ "valid": true, "node": node, "namespaces": namespaces });
        return say(out, shape.output, "", &all);
    }
    if !shape.no_headers {
        writeln!(out, "{}: valid\n", file.display())?;
    }
    let row = |whose: &str, value: &schema::PolicyValue| {
        [whose, &value.name, &value.value, &value.origin, &value.detail].map(format::safe).to_vec()
    };
    let mut rows: Vec<Vec<String>> = node.iter().map(|value| row("node", value)).collect();
    for (namespace, values) in &namespaces {
        rows.extend(values.iter().map(|value| row(&format!("namespace {namespace}"), value)));
    }
    let titles = ["POLICY OF", "VALUE OF", "IS", "FROM", "NAMELY"];
    Ok(table::print(out, (!shape.no_headers).then_some(&titles[..]), &rows)?)
}
