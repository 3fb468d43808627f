//! `cargo xtask personas`: runs the commands of the documents as users type them. Before the first
//! command, Affinode is not installed. After the last command, a container is offloaded.
//!
//! Each persona is a kind of user with a machine or a cluster. The commands are read from the
//! documents, counted and run, so a wrong document makes `cargo xtask personas` fail. The GPU is
//! simulated.

mod cluster;
mod containerd;
mod docker;
pub mod document;
pub mod jupyterhub;
mod machine;
mod plays;
pub mod shell;

use affinode_e2e::{artifacts::Artifacts, release::Release};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use nix::unistd::Uid;
use serde::Serialize;

use self::{
    document::{DocLine, Purpose},
    shell::Substitution,
};
use crate::{build, deps, output};

/// Which personas to play.
#[derive(Args)]
pub struct Options {
    /// Print JSON on standard output.
    #[arg(long)]
    json: bool,
    /// Count the commands, and run nothing.
    #[arg(long)]
    count: bool,
    /// The personas; all if none is named.
    #[arg(value_name = "NAME")]
    names: Vec<Persona>,
}

/// A user of Affinode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Persona {
    /// An engineer with one machine, one GPU and Docker.
    Docker,
    /// An engineer with one machine, one GPU, containerd and nerdctl.
    Nerdctl,
    /// A platform engineer with a Kubernetes cluster. If there is no cluster, the chart is only
    /// rendered and not installed.
    Kubernetes,
    /// An administrator of JupyterHub on a Kubernetes cluster. If there is no cluster, KubeSpawner
    /// creates the manifests of the pods, and no pod runs.
    Jupyterhub,
}

impl Persona {
    fn name(self) -> &'static str {
        match self {
            Persona::Docker => "docker",
            Persona::Nerdctl => "nerdctl",
            Persona::Kubernetes => "kubernetes",
            Persona::Jupyterhub => "jupyterhub",
        }
    }

    /// Documents that contain the persona's commands, in the order in which the user reads them.
    fn documents(self) -> &'static [&'static str] {
        match self {
            Persona::Docker => &["README.md"],
            Persona::Nerdctl => &["docs/quickstart.md"],
            Persona::Kubernetes => &["docs/kubernetes.md"],
            Persona::Jupyterhub => &["docs/jupyterhub.md"],
        }
    }

    /// The persona whose commands this persona types first, if there is one.
    fn begins_as(self) -> Option<Persona> {
        (self == Persona::Jupyterhub).then_some(Persona::Kubernetes)
    }

    /// Maximum number of commands that the persona may have to type.
    fn limit(self) -> usize {
        match self {
            Persona::Docker | Persona::Nerdctl => 3,
            Persona::Kubernetes => 4,
            Persona::Jupyterhub => 5,
        }
    }

    /// Returns the command lines of the persona's documents.
    pub fn lines(self) -> Result<Vec<DocLine>> {
        let mut lines = self.begins_as().map_or(Ok(Vec::new()), Persona::lines)?;
        for document in self.documents() {
            lines.extend(document::read(document, self.name())?);
        }
        Ok(lines)
    }
}

/// How the run of a persona's commands ended.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The commands were run. The text describes what the user saw.
    Passed(String),
    /// Only the commands that need no cluster were run. The text describes their result.
    Checked(String),
    /// The commands were not run. The text is the reason.
    NotRun(String),
    /// A command failed with this error.
    Failed(String),
}

/// A persona with its commands and their outcome.
#[derive(Debug, Serialize)]
struct Played {
    persona: Persona,
    commands: usize,
    limit: usize,
    lines: Vec<DocLine>,
    substitutions: Vec<Substitution>,
    outcome: Outcome,
}

impl Played {
    fn of(persona: Persona, play: impl FnOnce(&[DocLine]) -> Result<Ran>) -> Result<Self> {
        let (lines, limit) = (persona.lines()?, persona.limit());
        let steps = lines.iter().filter(|line| line.purpose == Purpose::Step);
        let commands = steps.map(DocLine::commands).sum();
        ensure!(commands <= limit, "{persona:?} types {commands} commands, at most {limit}");
        let (outcome, substitutions) = play(&lines)
            .unwrap_or_else(|error| (Outcome::Failed(format!("{error:#}")), Vec::new()));
        Ok(Self { persona, commands, limit, lines, substitutions, outcome })
    }

    fn print(&self) {
        let outcome = match &self.outcome {
            Outcome::Passed(seen) => format!("passed: {seen}"),
            Outcome::Checked(seen) => format!("checked without a cluster: {seen}"),
            Outcome::NotRun(why) => format!("not run: {why}"),
            Outcome::Failed(error) => format!("FAILED: {error}"),
        };
        let (name, commands, limit) = (self.persona.name(), self.commands, self.limit);
        output::out(&format!("{name}: {commands} commands, at most {limit}; {outcome}"));
        for line in &self.lines {
            let mark = if line.purpose == Purpose::Step { "$" } else { "(look) $" };
            output::out(&format!("  {}:{} {mark} {}", line.document, line.line, line.text));
        }
        for known in &self.substitutions {
            output::out(&format!("  in place of {}: {} ({})", known.from, known.to, known.why));
        }
    }
}

type Ran = (Outcome, Vec<Substitution>);

/// Counts the commands, builds the programs, runs the commands, and prints the outcomes.
pub fn run(options: &Options) -> Result<()> {
    let chosen = match options.names.as_slice() {
        [] => Persona::value_variants(),
        names => names,
    };
    let played = if options.count { count(chosen)? } else { play(chosen)? };
    if options.json {
        output::out(&serde_json::to_string_pretty(&played)?);
    } else {
        played.iter().for_each(Played::print);
    }
    match played.iter().any(|one| matches!(one.outcome, Outcome::Failed(_))) {
        true => bail!("at least one persona failed"),
        false => Ok(()),
    }
}

fn count(chosen: &[Persona]) -> Result<Vec<Played>> {
    let counted = |_: &[DocLine]| Ok((Outcome::NotRun("only counted".into()), Vec::new()));
    chosen.iter().map(|persona| Played::of(*persona, counted)).collect()
}

fn play(chosen: &[Persona]) -> Result<Vec<Played>> {
    if !Uid::effective().is_root() {
        bail!("the personas start a private containerd and install: run as root");
    }
    let releases = deps::all()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let release = releases.own()?;
    chosen.iter().map(|persona| one(*persona, &artifacts, release)).collect()
}

fn one(persona: Persona, artifacts: &Artifacts, release: &Release) -> Result<Played> {
    output::step(&format!("Persona {}", persona.name()));
    Played::of(persona, |lines| match persona {
        Persona::Docker => docker::run(lines, artifacts, release),
        Persona::Nerdctl => containerd::run(lines, artifacts, release),
        Persona::Kubernetes => cluster::run(lines, artifacts, release),
        Persona::Jupyterhub => {
            let (upgrade, earlier) = lines.split_last().context("there is no step")?;
            let (outcome, substitutions) = cluster::run(earlier, artifacts, release)?;
            match outcome {
                Outcome::Checked(_) => Ok((jupyterhub::check(upgrade, artifacts)?, substitutions)),
                other => Ok((other, substitutions)),
            }
        }
    })
}

/// Runs the personas that have one machine and no cluster, as a part of all tests.
pub fn of_one_machine(artifacts: &Artifacts, release: &Release) -> Result<()> {
    for persona in [Persona::Docker, Persona::Nerdctl] {
        let played = one(persona, artifacts, release)?;
        played.print();
        if let Outcome::Failed(error) = played.outcome {
            bail!("persona {}: {error}", persona.name());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The documents of each persona must contain commands, and no more of them than the persona's
    /// limit.
    #[test]
    fn documents_keep_within_the_limits() -> Result<()> {
        for played in count(Persona::value_variants())? {
            assert!(played.commands > 0, "{played:?}");
        }
        Ok(())
    }
}
