//! Runs the `affinode` command as a user does, and parses its JSON output as a script does.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::wait::{WAIT_TIMEOUT, until};

/// The command `affinode`, bound to the controller of one run directory.
#[derive(Clone, Debug)]
pub struct Cli {
    binary: PathBuf,
    run_dir: PathBuf,
}

/// The fields of `affinode ps -o json` that tests read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Node {
    /// The controller's process id.
    pub controller_pid: i32,
    /// Host memory in use for the contents of offloaded containers, in bytes.
    pub host_used_bytes: u64,
    /// The GPUs of the node.
    pub gpus: Vec<GpuRow>,
    /// The node's GPU containers.
    pub containers: Vec<ContainerRow>,
    /// Reason why the GPUs cannot be read. `None` if they can be read.
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
    /// VRAM in use, from NVML, in bytes.
    pub vram_used_bytes: u64,
    /// VRAM that is free because containers on this GPU are offloaded, in bytes.
    pub vram_reclaimed_bytes: u64,
    /// Whether the figures come from the simulated NVML.
    pub simulated: bool,
    /// Process id of the GPU's copier (the process that copies VRAM for others). It is 0 if there
    /// is no copier.
    pub copier_pid: i32,
    /// Number of restores that the GPU's copiers (processes that copy VRAM for others) have
    /// performed.
    pub copier_restores: u64,
    /// Number of processes whose host memory is registered with the copier.
    pub copier_registered: u32,
    /// Size of the offloaded memory whose content is stored once for several processes, in bytes.
    /// Each of these processes counts in full.
    pub copier_shared_bytes: u64,
    /// Size of the files with the content that is stored once for several processes, in bytes.
    pub copier_stored_bytes: u64,
    /// Number of processes that the GPU's copiers have copied out. A process counts once for each
    /// of its offloads.
    pub copier_offloads: u64,
    /// Number of resident processes whose host memory is prefaulted.
    pub copier_prefaulted: u32,
    /// Number of processes whose host memory the copier is registering at this moment.
    pub copier_registering: u32,
    /// VRAM of the copier itself, in bytes.
    pub copier_vram_bytes: u64,
}

/// A container, as `affinode ps` prints it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContainerRow {
    /// Name of the container, of the form namespace/pod/container, or namespace/id.
    pub name: String,
    /// Key by which the controller identifies the container.
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
    /// Name of the state, such as Active, Idle or Offloaded.
    pub state: String,
    /// Time of the last change of state, in milliseconds since 1970.
    pub since_unix_ms: i64,
    /// Stable word that states why the container is in its state.
    pub reason: String,
    /// VRAM that the container holds, in bytes.
    pub vram_bytes: u64,
    /// VRAM that the container's offload has freed, in bytes.
    pub offloaded_bytes: u64,
    /// Idle timeout that applies to the container, in milliseconds.
    pub idle_timeout_ms: u64,
    /// Engine that applies to the container.
    pub engine: String,
    /// Fraction of the container's VRAM that the library can copy at bus speed. `None` if unknown.
    pub copyable_share: Option<f64>,
    /// VRAM that the container's processes hold while the container is offloaded, in bytes.
    pub staying_bytes: u64,
    /// Content of the offloaded container that is on disk, in bytes.
    pub disk_bytes: u64,
    /// Reasons why VRAM of the container stays on the GPU while the container is offloaded.
    pub staying_reasons: Vec<String>,
    /// Number of the container's offloads up to now.
    pub offloads: u64,
    /// Number of the container's restores up to now.
    pub restores: u64,
    /// Duration of the last offload, in milliseconds.
    pub last_offload_ms: u64,
    /// Duration of the last wake (a restore that a CUDA call caused), measured by the process that
    /// made the call, in milliseconds.
    pub last_wake_ms: u64,
    /// CUDA processes of the container.
    pub processes: Vec<ProcessRow>,
    /// Warnings about invalid annotations.
    pub warnings: Vec<String>,
    /// ResourceClaims of the container, separated by commas.
    pub claim: String,
    /// Limit of the container's VRAM, in bytes. 0 if it has none.
    pub vram_limit_bytes: u64,
    /// What enforces the limit of the container's VRAM. Empty if it has none.
    pub vram_limit_enforced_by: String,
}

impl ContainerRow {
    /// Returns the first CUDA process that registered.
    ///
    /// # Errors
    /// When no process has registered; [`Cli::registered`] waits for one.
    pub fn process(&self) -> Result<&ProcessRow> {
        self.processes.first().with_context(|| format!("no process has registered: {self:?}"))
    }
}

/// A CUDA process of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ProcessRow {
    /// Process id in the controller's pid namespace.
    pub pid: i32,
    /// Phase of the process, as its agent (the library's thread in the process) reports it.
    pub phase: String,
    /// Number of CUDA calls up to now.
    pub calls: u64,
    /// VRAM that the library in the process can copy out, in bytes.
    pub swappable_bytes: u64,
    /// VRAM whose contents are copied out at present, in bytes.
    pub copied_out_bytes: u64,
    /// Host memory of the copy that the resident process retains for its next offload, in bytes.
    pub kept_bytes: u64,
    /// Amount of unchanged content that the last offload skipped, in bytes.
    pub unchanged_bytes: u64,
    /// Amount of memory that contained only zeros and that the last offload did not store, in
    /// bytes.
    pub zero_bytes: u64,
    /// Names of the process's hazards. A hazard makes an offload unsafe.
    pub hazards: Vec<String>,
    /// Name of the CUDA function that the process called last.
    pub last_call: String,
    /// VRAM that the process holds, in bytes.
    pub vram_bytes: u64,
    /// Percentage of the last sampling interval in which kernels of the process ran. `None` if
    /// unknown.
    pub utilization_percent: Option<u32>,
}

/// An event of the controller, parsed from a line of `affinode events -o json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct EventRow {
    /// Sequence number of the event. Each controller starts at 1.
    pub sequence: u64,
    /// Time of the event, in milliseconds since 1970.
    pub unix_ms: i64,
    /// Kind of event: state, refused, annotation, controller or process.
    pub kind: String,
    /// Name of the container, of the form namespace/pod/container, or namespace/id.
    pub container: String,
    /// State before the event.
    pub from: String,
    /// State after the event.
    pub to: String,
    /// Stable word that states the reason for the event.
    pub reason: String,
    /// VRAM that the offload or restore moved, in bytes.
    pub bytes: u64,
    /// Duration of the offload or restore, in milliseconds.
    pub elapsed_ms: u64,
    /// Text of the event for people.
    pub text: String,
}

/// Reply of the controller to an offload request, parsed from the output of `affinode offload -o
/// json`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ActionRow {
    /// Whether the offload took place.
    pub done: bool,
    /// State of the container after the request.
    pub state: String,
    /// Reason of the refusal, if the offload was refused.
    pub reason: String,
    /// VRAM that the offload moved, in bytes.
    pub bytes: u64,
    /// Duration of the offload, in milliseconds.
    pub elapsed_ms: u64,
}

const PS: [&str; 3] = ["ps", "-o", "json"];
/// Exit status of the program `timeout` after it has ended a command at the time limit.
const TIMED_OUT: i32 = 124;
/// Error text of the command `affinode` if no controller listens. On a busy machine, a controller
/// needs some time to start, so a command with this error is repeated.
const NO_CONTROLLER: &str = "cannot connect to the controller";
/// Reasons for which an offload is refused only temporarily. For example, a call is in progress, or
/// the process has not registered yet.
const PASSING: [&str; 4] = ["call-in-progress", "busy", "woken-meanwhile", "not-registered"];

impl Cli {
    /// Creates the command for the controller of a run directory.
    #[must_use]
    pub fn new(binary: PathBuf, run_dir: PathBuf) -> Self {
        Self { binary, run_dir }
    }

    /// The controller's run directory.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Builds the command `affinode` with these arguments.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.env("AFFINODE_RUN_DIR", &self.run_dir).args(arguments);
        command
    }

    /// Runs the command and returns its output, whatever its exit status.
    ///
    /// # Errors
    /// When the command cannot be run, or does not end within [`WAIT_TIMEOUT`].
    pub fn output(&self, arguments: &[&str]) -> Result<Output> {
        let mut limited = Command::new("timeout");
        limited.arg(WAIT_TIMEOUT.as_secs().to_string()).arg(&self.binary).args(arguments);
        limited.env("AFFINODE_RUN_DIR", &self.run_dir);
        let output =
            limited.output().with_context(|| format!("cannot run {}", self.binary.display()))?;
        if output.status.code() == Some(TIMED_OUT) {
            bail!(
                "affinode {} did not end within {} s",
                arguments.join(" "),
                WAIT_TIMEOUT.as_secs()
            );
        }
        Ok(output)
    }

    /// Runs the command, requires success, and returns its stdout. Waits if the controller is still
    /// starting.
    ///
    /// # Errors
    /// When the command fails, or no controller starts.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let listens = |output: &Output| {
            output.status.success()
                || !String::from_utf8_lossy(&output.stderr).contains(NO_CONTROLLER)
        };
        let output = until("a controller to reply", || {
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

    /// Returns the output of `affinode ps`. Waits if the controller is still starting.
    ///
    /// # Errors
    /// When no controller starts, or its reply cannot be parsed.
    pub fn ps(&self) -> Result<Node> {
        until("a controller to reply", || {
            Ok(Some(Self::node(&self.run(&PS)?)?).filter(|node| node.controller_pid != 0))
        })
    }

    /// Returns the output of `affinode ps`. A controller must already run.
    ///
    /// # Errors
    /// When no controller runs, or its reply cannot be parsed.
    pub fn ps_now(&self) -> Result<Node> {
        let node = Self::node(&Self::demand(&PS, &self.output(&PS)?)?)?;
        // Without a controller the command succeeds, but shows only the GPUs.
        if node.controller_pid == 0 {
            bail!("no controller runs");
        }
        Ok(node)
    }

    fn node(text: &str) -> Result<Node> {
        serde_json::from_str(text)
            .with_context(|| format!("cannot parse the output of `affinode ps -o json`: {text}"))
    }

    /// Returns the first GPU. Waits if the controller has started but has not read the GPU yet.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails, or there is no GPU.
    pub fn gpu(&self) -> Result<GpuRow> {
        until("the controller to see a GPU", || Ok(self.ps()?.gpus.into_iter().next()))
    }

    /// Waits until `wanted` returns true for the first GPU, and returns this GPU. `what` completes
    /// the error "waited for …".
    ///
    /// # Errors
    /// When [`Cli::ps`] fails, or `wanted` does not return true in time.
    pub fn wait_gpu(&self, what: &str, wanted: impl Fn(&GpuRow) -> bool) -> Result<GpuRow> {
        let mut last = GpuRow::default();
        until(what, || {
            last = self.gpu()?;
            Ok(wanted(&last).then(|| last.clone()))
        })
        .with_context(|| format!("last reading: {last:?}"))
    }

    /// Returns the container with this containerd id. `None` if the controller does not list it.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails.
    pub fn container(&self, id: &str) -> Result<Option<ContainerRow>> {
        let rows = self.ps()?.containers;
        Ok(rows.into_iter().find(|row| row.id == id))
    }

    /// Waits until the controller lists a container, and returns the container's row of `affinode
    /// ps`.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails, or the container is not listed in time.
    pub fn known(&self, id: &str) -> Result<ContainerRow> {
        until(&format!("{id} to be known"), || self.container(id))
    }

    /// Waits until a process of the container has registered and its first call has reached the
    /// controller. Returns the container's row of `affinode ps`.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails, or no process registers in time.
    pub fn registered(&self, id: &str) -> Result<ContainerRow> {
        self.wait_for(id, "to be registered", |row| !row.processes.is_empty())
    }

    /// Waits until `wanted` returns true for a container's row of `affinode ps`, and returns the
    /// row. `what` completes the error "waited for the container …". The wait is necessary because
    /// a program's reply can arrive before the controller has recorded the offload or restore.
    ///
    /// # Errors
    /// When the row does not match in time.
    pub fn wait_for(
        &self,
        id: &str,
        what: &str,
        wanted: impl Fn(&ContainerRow) -> bool,
    ) -> Result<ContainerRow> {
        let mut last = String::from("unknown");
        until(&format!("{id} {what}"), || {
            // A controller that is starting or restarting does not reply yet.
            match self.container(id) {
                Ok(Some(row)) if wanted(&row) => return Ok(Some(row)),
                Ok(Some(row)) => last = format!("{row:?}"),
                Ok(None) => last = "unknown".into(),
                Err(error) => last = format!("{error:#}"),
            }
            Ok(None)
        })
        .with_context(|| format!("last reading: {last}"))
    }

    /// Waits until `wanted` returns true for an event, and returns all events. The controller
    /// publishes an event slightly after its cause.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails, or no event matches in time.
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
        .with_context(|| format!("events so far: {last:#?}"))
    }

    /// Returns the events since the controller's start, oldest first.
    ///
    /// # Errors
    /// When [`Cli::ps`] fails.
    pub fn events(&self) -> Result<Vec<EventRow>> {
        let text = self.run(&["events", "-o", "json"])?;
        text.lines()
            .map(|line| {
                serde_json::from_str(line).with_context(|| format!("cannot parse an event: {line}"))
            })
            .collect()
    }

    /// Runs `affinode offload` for a resident container, and returns the reply. Repeats the command
    /// after a temporary refusal.
    ///
    /// # Errors
    /// If the command cannot be run.
    pub fn offload(&self, id: &str) -> Result<ActionRow> {
        until(&format!("an answer about {id}"), || {
            let is_resident = |row: &ContainerRow| ["Active", "Idle"].contains(&row.state.as_str());
            if !self.container(id).ok().flatten().is_some_and(|row| is_resident(&row)) {
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

    /// Like [`Cli::offload`], but requires that the offload takes place.
    ///
    /// # Errors
    /// When the offload is refused.
    pub fn move_out(&self, id: &str) -> Result<ActionRow> {
        let said = self.offload(id)?;
        if !said.done {
            bail!("{id} was not offloaded: {said:?}");
        }
        Ok(said)
    }

    /// Waits until a container is resident (active or idle), and returns its row. On a slow machine
    /// the container may become idle again before the test sees it as active.
    ///
    /// # Errors
    /// When the container is not resident in time.
    pub fn wait_resident(&self, id: &str) -> Result<ContainerRow> {
        self.wait_for(id, "to be resident", |row| ["Active", "Idle"].contains(&row.state.as_str()))
    }

    /// Waits until a container is in a state, and returns its row.
    ///
    /// # Errors
    /// When the container does not reach the state in time.
    pub fn wait_for_state(&self, id: &str, state: &str) -> Result<ContainerRow> {
        self.wait_for(id, &format!("to be {state}"), |row| row.state == state)
    }
}
