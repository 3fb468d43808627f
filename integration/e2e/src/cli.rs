//! The `affinode` command as a user runs it, and its JSON as a script reads it.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::wait::{WAIT_TIMEOUT, until};

/// The `affinode` command on one controller.
#[derive(Clone, Debug)]
pub struct Cli {
    binary: PathBuf,
    run_dir: PathBuf,
}

/// `affinode ps -o json`: what tests read of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The controller's process id.
    pub controller_pid: i32,
    /// Host memory with offloaded contents, in bytes.
    pub host_used_bytes: u64,
    /// The GPUs of the node.
    pub gpus: Vec<GpuRow>,
    /// The node's GPU containers.
    pub containers: Vec<ContainerRow>,
    /// Why the GPUs cannot be seen.
    pub gpu_error: Option<String>,
}

/// A GPU, as `affinode ps` prints it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct GpuRow {
    /// Product name of the GPU.
    pub name: String,
    /// Total VRAM in bytes.
    pub vram_total_bytes: u64,
    /// VRAM in use, by NVML.
    pub vram_used_bytes: u64,
    /// VRAM that offloaded containers gave back.
    pub vram_reclaimed_bytes: u64,
    /// Whether NVML is the simulated one.
    pub simulated: bool,
    /// Pid of its copier; 0: there is none.
    pub copier_pid: i32,
    /// Processes that its copiers have filled.
    pub copier_restores: u64,
    /// Processes whose memory it holds.
    pub copier_registered: u32,
    /// What processes hold once with others, over all of them.
    pub copier_shared_bytes: u64,
    /// The files that hold it.
    pub copier_stored_bytes: u64,
    /// Processes that it has copied out.
    pub copier_offloads: u64,
    /// Processes that are resident, and whose host memory is ready for the next time.
    pub copier_prefaulted: u32,
    /// Processes whose memory it is getting hold of.
    pub copier_registering: u32,
    /// VRAM that it holds itself.
    pub copier_vram_bytes: u64,
}

/// A container, as `affinode ps` prints it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContainerRow {
    /// Name of the form namespace/pod/container, or namespace/id.
    pub name: String,
    /// Key of the container at the controller.
    pub key: String,
    /// Namespace of the container in containerd.
    pub namespace: String,
    /// Id of the container in containerd.
    pub id: String,
    /// Namespace of the pod in Kubernetes.
    pub pod_namespace: String,
    /// Name of the pod in Kubernetes.
    pub pod: String,
    /// Name of the container in its pod.
    pub container: String,
    /// Name of the container's image.
    pub image: String,
    /// Active, Idle, Offloaded, …
    pub state: String,
    /// Since when, milliseconds since the epoch.
    pub since_unix_ms: i64,
    /// Why it is where it is.
    pub reason: String,
    /// VRAM that the container holds, in bytes.
    pub vram_bytes: u64,
    /// VRAM it gave back.
    pub offloaded_bytes: u64,
    /// The effective idle timeout.
    pub idle_timeout_ms: u64,
    /// Engine in effect for the container.
    pub engine: String,
    /// The part of its VRAM that is copied at the speed of the bus.
    pub copyable_share: Option<f64>,
    /// Moves out so far.
    pub offloads: u64,
    /// Number of restores up to now.
    pub restores: u64,
    /// Duration of the last move out.
    pub last_offload_ms: u64,
    /// Duration of the last return, as the caller felt it.
    pub last_wake_ms: u64,
    /// CUDA processes of the container.
    pub processes: Vec<ProcessRow>,
    /// Annotations that were not understood.
    pub warnings: Vec<String>,
}

impl ContainerRow {
    /// The first CUDA process that has registered.
    ///
    /// # Errors
    /// When none has: see [`Cli::registered`].
    pub fn process(&self) -> Result<&ProcessRow> {
        self.processes.first().with_context(|| format!("no process has registered: {self:?}"))
    }
}

/// A CUDA process of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessRow {
    /// In the controller's pid namespace.
    pub pid: i32,
    /// Where it is in its agent's eyes.
    pub phase: String,
    /// Calls counted so far.
    pub calls: u64,
    /// VRAM that its agent can copy.
    pub swappable_bytes: u64,
    /// What of it is copied now.
    pub copied_out_bytes: u64,
    /// Host memory that it keeps while it is resident.
    pub kept_bytes: u64,
    /// What the last move out did not copy again.
    pub unchanged_bytes: u64,
    /// What the last move out did not store, because it is all zero.
    pub zero_bytes: u64,
    /// What makes it unsafe to move.
    pub hazards: Vec<String>,
    /// The function that it called last.
    pub last_call: String,
    /// VRAM that the process holds, in bytes.
    pub vram_bytes: u64,
    /// Share of the last moment in which its work ran.
    pub utilization_percent: Option<u32>,
}

/// A line of `affinode events -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct EventRow {
    /// Counts up from 1 in each controller.
    pub sequence: u64,
    /// When, milliseconds since the epoch.
    pub unix_ms: i64,
    /// state, refused, annotation, controller, process.
    pub kind: String,
    /// Name of the form namespace/pod/container, or namespace/id.
    pub container: String,
    /// State before the event.
    pub from: String,
    /// State after the event.
    pub to: String,
    /// Stable word of the reason.
    pub reason: String,
    /// VRAM that was moved.
    pub bytes: u64,
    /// How long it took.
    pub elapsed_ms: u64,
    /// Text of the event for people.
    pub text: String,
}

/// `affinode offload -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ActionRow {
    /// Whether it was carried out.
    pub done: bool,
    /// The state it is in now.
    pub state: String,
    /// Reason of a refusal.
    pub reason: String,
    /// VRAM that was moved.
    pub bytes: u64,
    /// How long it took.
    pub elapsed_ms: u64,
}

const PS: [&str; 3] = ["ps", "-o", "json"];
/// Exit status of `timeout` when it had to end the command.
const TIMED_OUT: i32 = 124;
/// What the command says when no controller listens: on a busy machine one may be about to.
const NO_CONTROLLER: &str = "cannot connect to the controller";
/// Refusals that pass by themselves: a call is in the way, or the process is about to register.
const PASSING: [&str; 4] = ["call-in-progress", "busy", "woken-meanwhile", "not-registered"];

impl Cli {
    /// The command on the controller of a run directory.
    #[must_use]
    pub fn new(binary: PathBuf, run_dir: PathBuf) -> Self {
        Self { binary, run_dir }
    }

    /// The controller's run directory.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// A command with these arguments.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.env("AFFINODE_RUN_DIR", &self.run_dir).args(arguments);
        command
    }

    /// Runs it, whatever its exit status.
    ///
    /// # Errors
    /// When it cannot be run, or does not answer in [`WAIT_TIMEOUT`].
    pub fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut limited = Command::new("timeout");
        limited.arg(WAIT_TIMEOUT.as_secs().to_string()).arg(&self.binary).args(arguments);
        limited.env("AFFINODE_RUN_DIR", &self.run_dir);
        let output =
            limited.output().with_context(|| format!("cannot run {}", self.binary.display()))?;
        if output.status.code() == Some(TIMED_OUT) {
            bail!(
                "affinode {} did not answer in {} s",
                arguments.join(" "),
                WAIT_TIMEOUT.as_secs()
            );
        }
        Ok(output)
    }

    /// Runs it and demands success, from a controller that is about to start as well.
    ///
    /// # Errors
    /// When it fails, or no controller comes.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let listens = |output: &Output| {
            output.status.success()
                || !String::from_utf8_lossy(&output.stderr).contains(NO_CONTROLLER)
        };
        let output = until("a controller to answer", || {
            self.output(arguments).map(|output| Some(output).filter(listens))
        })?;
        Self::demand(arguments, &output)
    }

    fn demand(arguments: &[&str], output: &Output) -> Result<String> {
        if !output.status.success() {
            bail!(
                "affinode {}: {}: {}",
                arguments.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the controller knows; waits for one that is about to start.
    ///
    /// # Errors
    /// When no controller comes, or its answer cannot be read.
    pub fn ps(&self) -> Result<Node> {
        Self::node(&self.run(&PS)?)
    }

    /// The same of a controller that is there now.
    ///
    /// # Errors
    /// When there is none, or its answer cannot be read.
    pub fn ps_now(&self) -> Result<Node> {
        Self::node(&Self::demand(&PS, &self.output(&PS)?)?)
    }

    fn node(text: &str) -> Result<Node> {
        serde_json::from_str(text).with_context(|| format!("`affinode ps -o json` said: {text}"))
    }

    /// The first GPU. A controller that has just started has not seen it yet.
    ///
    /// # Errors
    /// As [`Cli::ps`]; also when there is none.
    pub fn gpu(&self) -> Result<GpuRow> {
        until("the controller to see a GPU", || Ok(self.ps()?.gpus.into_iter().next()))
    }

    /// The first GPU, once it is as wanted; `what` completes "waited for …".
    ///
    /// # Errors
    /// As [`Cli::ps`]; also when it does not get there.
    pub fn wait_gpu(&self, what: &str, wanted: impl Fn(&GpuRow) -> bool) -> Result<GpuRow> {
        let mut last = GpuRow::default();
        until(what, || {
            last = self.gpu()?;
            Ok(wanted(&last).then(|| last.clone()))
        })
        .with_context(|| format!("it was {last:?}"))
    }

    /// A container by containerd's id, if the controller knows it.
    ///
    /// # Errors
    /// As [`Cli::ps`].
    pub fn container(&self, id: &str) -> Result<Option<ContainerRow>> {
        let rows = self.ps()?.containers;
        Ok(rows.into_iter().find(|row| row.id == id))
    }

    /// The row of a container that the controller lists, or will list soon.
    ///
    /// # Errors
    /// As [`Cli::ps`], or when it stays unknown.
    pub fn known(&self, id: &str) -> Result<ContainerRow> {
        until(&format!("{id} to be known"), || self.container(id))
    }

    /// A container of which a process has registered: its first call has reached the controller.
    ///
    /// # Errors
    /// As [`Cli::ps`], or when none registers.
    pub fn registered(&self, id: &str) -> Result<ContainerRow> {
        self.wait_for(id, "to be registered", |row| !row.processes.is_empty())
    }

    /// A container, once it is as wanted; `what` completes "waited for the container …".
    /// An answer of a program may be there before the controller knows of the move behind it.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn wait_for(
        &self,
        id: &str,
        what: &str,
        wanted: impl Fn(&ContainerRow) -> bool,
    ) -> Result<ContainerRow> {
        let mut last = String::from("unknown");
        until(&format!("{id} {what}"), || {
            // The controller may be about to start, or to come back.
            match self.container(id) {
                Ok(Some(row)) if wanted(&row) => return Ok(Some(row)),
                Ok(Some(row)) => last = format!("{row:?}"),
                Ok(None) => last = "unknown".into(),
                Err(error) => last = format!("{error:#}"),
            }
            Ok(None)
        })
        .with_context(|| format!("it was {last}"))
    }

    /// The events, once one of them matches: the controller publishes them a moment after what they
    /// report.
    ///
    /// # Errors
    /// As [`Cli::ps`], or when it does not come.
    pub fn wait_for_event(
        &self,
        what: &str,
        wanted: impl Fn(&EventRow) -> bool,
    ) -> Result<Vec<EventRow>> {
        let mut last = Vec::new();
        until(what, || {
            last = self.events()?;
            Ok(last.iter().any(&wanted).then(|| last.clone()))
        })
        .with_context(|| format!("the events are {last:#?}"))
    }

    /// What happened since the controller started, oldest first.
    ///
    /// # Errors
    /// As [`Cli::ps`].
    pub fn events(&self) -> Result<Vec<EventRow>> {
        let text = self.run(&["events", "-o", "json"])?;
        text.lines()
            .map(|line| {
                serde_json::from_str(line).with_context(|| format!("an event said: {line}"))
            })
            .collect()
    }

    /// `affinode offload` of a resident container, repeated after a temporary refusal.
    ///
    /// # Errors
    /// If the command cannot be run.
    pub fn offload(&self, id: &str) -> Result<ActionRow> {
        until(&format!("an answer about {id}"), || {
            let at_home = |row: &ContainerRow| ["Active", "Idle"].contains(&row.state.as_str());
            if !self.container(id).ok().flatten().is_some_and(|row| at_home(&row)) {
                return Ok(None);
            }
            let output = self.output(&["offload", id, "-o", "json"])?;
            let text = String::from_utf8_lossy(&output.stdout);
            let said: ActionRow = serde_json::from_str(&text)
                .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
            let passing = !said.done && PASSING.contains(&said.reason.as_str());
            Ok((!passing).then_some(said))
        })
    }

    /// The same, and it must be carried out.
    ///
    /// # Errors
    /// When it is refused.
    pub fn move_out(&self, id: &str) -> Result<ActionRow> {
        let said = self.offload(id)?;
        if !said.done {
            bail!("{id} was not moved out: {said:?}");
        }
        Ok(said)
    }

    /// Waits until a container has its memory on the GPU: a machine may be so slow that it is idle again
    /// before it is seen to be active.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn wait_resident(&self, id: &str) -> Result<ContainerRow> {
        self.wait_for(id, "to be resident", |row| ["Active", "Idle"].contains(&row.state.as_str()))
    }

    /// Waits until a container is in a state, and returns how it is then.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn wait_for_state(&self, id: &str, state: &str) -> Result<ContainerRow> {
        self.wait_for(id, &format!("to be {state}"), |row| row.state == state)
    }
}
