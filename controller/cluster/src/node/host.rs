//! The node below us: what `affinode` does there, from this container, and the part of the
//! controller's configuration that the cluster chose.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use clap::Args;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::process::Command;

/// The file of ours in the controller's configuration.
const DROP_IN: &str = "conf.d/50-cluster.toml";
/// An installation waits for containerd for a minute.
const TIME: Duration = Duration::from_secs(180);

/// Where things are on the node.
#[derive(Args, Clone, Debug)]
pub struct HostPaths {
    /// The node's root, as this container sees it.
    #[arg(long, value_name = "DIR", default_value = "/proc/1/root")]
    pub host_root: PathBuf,
    /// Below it are bin and lib/affinode.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Where is kept what was installed.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// The controller's run directory.
    #[arg(long, value_name = "DIR", default_value = "/run/affinode")]
    pub run_dir: PathBuf,
    /// The folder of the controller's config.toml.
    #[arg(long, value_name = "DIR", default_value = "/etc/affinode")]
    config_dir: PathBuf,
    /// containerd's socket; where distributions put it when left out.
    #[arg(long, value_name = "SOCKET")]
    containerd: Option<PathBuf>,
    /// Name of the handler, which the RuntimeClass names.
    #[arg(long, value_name = "NAME", default_value = "affinode")]
    runtime_name: String,
    /// How containerd takes note: systemd, none.
    #[arg(long, value_name = "HOW", default_value = "systemd")]
    restart_mode: String,
    /// containerd's unit; that of k3s or rke2 where containerd is theirs, else containerd, when
    /// left out.
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// How long running containers are waited for before Affinode is taken off.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = humantime::parse_duration)]
    drain: Duration,
    /// A file with what the cluster wants in the controllers' configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What the node did not do.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The command cannot be run.
    #[error("cannot run affinode, which belongs beside this program")]
    Run(#[source] io::Error),
    /// It takes too long.
    #[error("affinode {0} did not end in time")]
    Late(&'static str),
    /// It said no.
    #[error("{0}")]
    Refused(String),
    /// It says something else.
    #[error("affinode {verb} did not answer in JSON: are the agent and the programs of one image?")]
    Answer {
        /// What it was asked for.
        verb: &'static str,
        /// Why it is not understood.
        #[source]
        source: serde_json::Error,
    },
    /// The configuration.
    #[error("cannot read or write {}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// How the handler stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerState {
    /// containerd serves it, and all files are as they were installed.
    Served,
    /// containerd has not been restarted since.
    RestartNeeded,
    /// Anything else: it is to be installed.
    #[serde(other)]
    Missing,
}

#[derive(Deserialize)]
struct HostStatus {
    handler: Option<HandlerStatus>,
    in_place: bool,
}

#[derive(Deserialize)]
struct HandlerStatus {
    state: HandlerState,
}

impl HostPaths {
    /// A path of the node, as this container sees it.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        self.host_root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// What would be done to install what this container brings.
    ///
    /// # Errors
    /// [`HostError`].
    pub async fn plan(&self) -> Result<Vec<String>, HostError> {
        let output = self.installer("install", &["--dry-run", "-o", "json"], TIME).await?;
        parse("install", &succeeded(output)?)
    }

    /// Installs it.
    ///
    /// # Errors
    /// [`HostError`]; containerd's configuration is as it was then.
    pub async fn install(&self) -> Result<Vec<String>, HostError> {
        parse("install", &succeeded(self.installer("install", &["-o", "json"], TIME).await?)?)
    }

    /// How it stands.
    ///
    /// # Errors
    /// [`HostError`].
    pub async fn status(&self) -> Result<HandlerState, HostError> {
        let output = self.run("status", &["-o", "json"], TIME).await?;
        if output.stdout.is_empty() {
            // Nothing is installed.
            return Ok(HandlerState::Missing);
        }
        let status: HostStatus = parse("status", &output.stdout)?;
        let handler = status.handler.map_or(HandlerState::Missing, |handler| handler.state);
        Ok(if handler == HandlerState::Served && !status.in_place {
            HandlerState::Missing
        } else {
            handler
        })
    }

    /// Waits until it could be taken off, and changes nothing.
    ///
    /// # Errors
    /// [`HostError`]: containers of it run, most likely.
    pub async fn may_go(&self) -> Result<(), HostError> {
        self.take_off(&["--dry-run"]).await
    }

    /// Takes all of it off; nothing that is not there is missed.
    ///
    /// # Errors
    /// [`HostError`]: containers of it run, most likely.
    pub async fn uninstall(&self) -> Result<(), HostError> {
        self.take_off(&[]).await?;
        let file = self.on_host(&self.config_dir.join(DROP_IN));
        match fs::remove_file(&file) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(HostError::Config { path: file, source })
            }
            _ => {
                // Ours, where nobody else keeps anything in them.
                let folders = file.ancestors().skip(1).take(2);
                folders.for_each(|folder| drop(fs::remove_dir(folder)));
                Ok(())
            }
        }
    }

    /// Where there is something.
    async fn take_off(&self, more: &[&str]) -> Result<(), HostError> {
        let output = self.run("status", &["-o", "json"], TIME).await?;
        if output.stdout.is_empty() {
            return Ok(());
        }
        let drain = humantime::format_duration(self.drain).to_string().replace(' ', "");
        let arguments = [&["--drain", &drain], more].concat();
        succeeded(self.installer("uninstall", &arguments, TIME + self.drain).await?).map(drop)
    }

    /// Puts the cluster's part of the configuration in place, when it is one: a controller does
    /// not start with a bad one. Says whether it is another now.
    ///
    /// # Errors
    /// [`HostError`]; what was there stays.
    pub async fn configure(&self) -> Result<bool, HostError> {
        let Some(config) = &self.config else { return Ok(false) };
        let file = self.on_host(&self.config_dir.join(DROP_IN));
        let fail = |path: &Path| {
            let path = path.to_owned();
            move |source| HostError::Config { path, source }
        };
        let wanted = fs::read(config).map_err(fail(config))?;
        if fs::read(&file).is_ok_and(|there| there == wanted) {
            return Ok(false);
        }
        let mut validate = affinode()?;
        validate.args(["policy", "validate"]).arg(config);
        succeeded(finish("policy validate", &mut validate, TIME).await?)?;
        let put = || {
            fs::create_dir_all(file.parent().unwrap_or(&file))?;
            let fresh = file.with_extension("toml.new");
            fs::write(&fresh, wanted)?;
            fs::rename(&fresh, &file)
        };
        put().map(|()| true).map_err(fail(&file))
    }

    async fn installer(
        &self,
        verb: &'static str,
        more: &[&str],
        time: Duration,
    ) -> Result<Output, HostError> {
        let mut arguments = vec!["--restart-mode", &self.restart_mode];
        if let Some(unit) = &self.unit {
            arguments.extend(["--unit", unit]);
        }
        if verb == "install" {
            arguments.extend(["--runtime-name", &self.runtime_name]);
        }
        arguments.extend(more);
        self.run(verb, &arguments, time).await
    }

    async fn run(
        &self,
        verb: &'static str,
        more: &[&str],
        time: Duration,
    ) -> Result<Output, HostError> {
        let mut command = affinode()?;
        command.arg(verb).arg("--host-root").arg(&self.host_root);
        command.arg("--prefix").arg(&self.prefix).arg("--state-dir").arg(&self.state_dir);
        if let Some(socket) = &self.containerd {
            command.arg("--containerd").arg(socket);
        }
        finish(verb, command.args(more), time).await
    }
}

/// The command, which lies beside this program.
fn affinode() -> Result<Command, HostError> {
    let own = std::env::current_exe().map_err(HostError::Run)?;
    Ok(Command::new(own.with_file_name("affinode")))
}

/// Runs it. An installation that has begun ends, whatever becomes of us.
async fn finish(
    verb: &'static str,
    command: &mut Command,
    time: Duration,
) -> Result<Output, HostError> {
    let output = tokio::time::timeout(time, command.stdin(Stdio::null()).output()).await;
    output.map_err(|_| HostError::Late(verb))?.map_err(HostError::Run)
}

fn succeeded(output: Output) -> Result<Vec<u8>, HostError> {
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(HostError::Refused(if said.is_empty() { output.status.to_string() } else { said }))
}

fn parse<T: DeserializeOwned>(verb: &'static str, text: &[u8]) -> Result<T, HostError> {
    serde_json::from_slice(text).map_err(|source| HostError::Answer { verb, source })
}
