//! `affinode install`, `uninstall`, `status`: prints what [`crate::install`] does and finds.

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::ValueEnum;

use super::{CliError, OutputFormat};
use crate::install::{
    self, FileState, HandlerState, InstallOptions, InstallStatus, RestartRequest, SourceFile,
};

/// Put Affinode on this node: programs, library, and a handler in containerd's
/// configuration. Compares the whole configuration before and after, and puts it back when
/// anything but the handler differs or containerd does not come back with it.
#[derive(Debug, clap::Args)]
pub struct InstallArgs {
    /// The folder with the files; that of this program when left out.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// How to print: table, or json, an array of the steps.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// Name of the handler, which a RuntimeClass names.
    #[arg(long, value_name = "NAME", default_value = "affinode")]
    runtime_name: String,
    #[command(flatten)]
    places: InstallPaths,
}

/// Take Affinode off this node again: what was added, no more. Refused while containers or
/// jobs of it run.
#[derive(Debug, clap::Args)]
pub struct UninstallArgs {
    /// Wait so long for the containers and jobs that run to end: 10m.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    drain: Option<Duration>,
    #[command(flatten)]
    places: InstallPaths,
}

/// Show what is installed on this node, and whether all of it is as it was installed. Exit
/// status 1 when it is not, or when nothing is.
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
    /// containerd's socket; when left out, where it was at the installation, or where
    /// distributions put it.
    #[arg(long, value_name = "SOCKET", env = "CONTAINERD_ADDRESS")]
    containerd: Option<PathBuf>,
    /// Where what was installed is kept.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// Below it are bin and lib/affinode.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// The node's root, where this runs in a container.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct InstallPaths {
    /// The node's root, where this runs in a container: /proc/1/root with the node's pid
    /// namespace. All other paths, but that of --from, are then the node's.
    #[arg(long, value_name = "DIR")]
    host_root: Option<PathBuf>,
    /// containerd's socket; when left out, where it was at the installation, or where
    /// distributions put it.
    #[arg(long, value_name = "SOCKET", env = "CONTAINERD_ADDRESS")]
    containerd: Option<PathBuf>,
    /// Below it are bin and lib/affinode. Elsewhere than here, containerd needs them in
    /// PATH and AFFINODE_LIB_DIR.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Where to keep what was installed.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/affinode")]
    state_dir: PathBuf,
    /// How containerd takes note of its configuration.
    #[arg(long, value_name = "HOW", default_value = "systemd")]
    restart_mode: RestartMode,
    /// containerd's unit; that of k3s or rke2 where containerd is theirs, else containerd, when
    /// left out.
    #[arg(long, value_name = "UNIT")]
    unit: Option<String>,
    /// Only print what would be done.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RestartMode {
    /// systemctl restart.
    Systemd,
    /// You restart it.
    None,
}

impl InstallPaths {
    /// On the node from here on, where that is elsewhere.
    fn options(self, runtime_name: String) -> Result<InstallOptions, CliError> {
        if let Some(root) = &self.host_root {
            install::enter(root)?;
        }
        let restart = match self.restart_mode {
            RestartMode::Systemd => RestartRequest::Systemd { unit: self.unit },
            RestartMode::None => RestartRequest::None,
        };
        Ok(InstallOptions {
            containerd: self.containerd,
            prefix: self.prefix,
            state_dir: self.state_dir,
            runtime_name,
            restart,
            drain: Duration::ZERO,
            dry_run: self.dry_run,
        })
    }
}

pub fn install(out: &mut dyn Write, asked: InstallArgs) -> Result<(), CliError> {
    let source = match &asked.from {
        Some(folder) => SourceFile::of(folder)?,
        None => SourceFile::of(&own_folder()?)?,
    };
    let options = asked.places.options(asked.runtime_name)?;
    let steps = install::install(&options, &source)?;
    match asked.output {
        // A line, for programs.
        OutputFormat::Json => {
            serde_json::to_writer(&mut *out, &steps)?;
            Ok(writeln!(out)?)
        }
        OutputFormat::Yaml => Ok(serde_yaml_ng::to_writer(&mut *out, &steps)?),
        OutputFormat::Table | OutputFormat::Wide => print(out, options.dry_run, &steps),
    }
}

pub fn uninstall(out: &mut dyn Write, asked: UninstallArgs) -> Result<(), CliError> {
    let options = InstallOptions {
        drain: asked.drain.unwrap_or_default(),
        ..asked.places.options(String::new())?
    };
    print(out, options.dry_run, &install::uninstall(&options)?)
}

pub fn status(out: &mut dyn Write, asked: StatusArgs) -> Result<(), CliError> {
    let StatusArgs { output, containerd, state_dir, prefix, host_root } = asked;
    if let Some(root) = &host_root {
        install::enter(root)?;
    }
    let options = InstallOptions {
        containerd,
        prefix,
        state_dir,
        runtime_name: String::new(),
        restart: RestartRequest::None,
        drain: Duration::ZERO,
        dry_run: true,
    };
    let Some(status) = install::status(&options)? else {
        let folder = options.state_dir.display();
        return Err(CliError::NotDone(format!("nothing is installed: no record in {folder}")));
    };
    match output {
        OutputFormat::Json => {
            serde_json::to_writer_pretty(&mut *out, &status)?;
            writeln!(out)?;
        }
        OutputFormat::Yaml => serde_yaml_ng::to_writer(&mut *out, &status)?,
        OutputFormat::Table | OutputFormat::Wide => print_status(out, &status)?,
    }
    match status.in_place {
        true => Ok(()),
        false => Err(CliError::NotDone("not all of it is in place".into())),
    }
}

fn print_status(out: &mut dyn Write, status: &InstallStatus) -> Result<(), CliError> {
    let mut rows: Vec<(String, &str)> = Vec::new();
    for file in &status.files {
        let state = match file.state {
            FileState::InPlace => "as installed",
            FileState::Changed => {
                "changed since: run affinode install, or it is left when you uninstall"
            }
            FileState::Missing => "missing: run affinode install",
        };
        rows.push((file.path.display().to_string(), state));
    }
    if let Some(handler) = &status.handler {
        let state = match handler.state {
            HandlerState::Served => "served by containerd",
            HandlerState::RestartNeeded => "restart containerd: it knows nothing of this yet",
            HandlerState::NotRead => "containerd does not read that file: run affinode install",
            HandlerState::NoContainerd => "no containerd runs",
            HandlerState::Changed => "changed since: take it out by hand and install again",
        };
        rows.push((
            format!("handler {} in {}", handler.name, handler.config_file.display()),
            state,
        ));
    }
    let width = rows.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
    for (what, state) in rows {
        writeln!(out, "{what:width$}  {state}")?;
    }
    match status.running_shims {
        0 => writeln!(out, "no container uses it")?,
        1 => writeln!(out, "1 shim runs")?,
        shims => writeln!(out, "{shims} shims run")?,
    }
    Ok(())
}

/// The folder above `bin`, or that of the program.
fn own_folder() -> Result<PathBuf, CliError> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().filter(|_| folder.ends_with("bin"));
    Ok(above.unwrap_or(folder).to_owned())
}

fn print(out: &mut dyn Write, dry_run: bool, steps: &[String]) -> Result<(), CliError> {
    match (dry_run, steps.is_empty()) {
        (_, true) => writeln!(out, "everything is in place: nothing to do")?,
        (true, false) => writeln!(out, "would do:")?,
        (false, false) => {}
    }
    for step in steps {
        writeln!(out, "{step}")?;
    }
    Ok(())
}
