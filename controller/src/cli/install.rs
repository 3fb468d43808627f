//! `affinode install`, `uninstall`: prints what [`crate::install`] does.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use clap::ValueEnum;

use super::CliError;
use crate::install::{self, Options, Restart, Source};

/// Put Affinode on this node: programs, library, and a handler in containerd's
/// configuration. Compares the whole configuration before and after, and puts it back when
/// anything but the handler differs or containerd does not come back with it.
#[derive(Debug, clap::Args)]
pub struct Install {
    /// The folder with the files; that of this program when left out.
    #[arg(long, value_name = "DIR")]
    from: Option<PathBuf>,
    /// Name of the handler, which a RuntimeClass names.
    #[arg(long, value_name = "NAME", default_value = "affinode")]
    runtime_name: String,
    #[command(flatten)]
    places: Places,
}

/// Take Affinode off this node again: what was added, no more. Refused while containers of
/// it run.
#[derive(Debug, clap::Args)]
pub struct Uninstall {
    #[command(flatten)]
    places: Places,
}

#[derive(Debug, clap::Args)]
struct Places {
    /// containerd's socket; where distributions put it when left out.
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
    /// containerd's unit.
    #[arg(long, value_name = "UNIT", default_value = "containerd")]
    unit: String,
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

impl Places {
    fn options(self, runtime_name: String) -> Options {
        let restart = match self.restart_mode {
            RestartMode::Systemd => Restart::Systemd { unit: self.unit },
            RestartMode::None => Restart::None,
        };
        Options {
            containerd: self.containerd,
            prefix: self.prefix,
            state_dir: self.state_dir,
            runtime_name,
            restart,
            dry_run: self.dry_run,
        }
    }
}

pub fn install(out: &mut dyn Write, asked: Install) -> Result<(), CliError> {
    let source = match &asked.from {
        Some(folder) => Source::of(folder)?,
        None => Source::of(&own_folder()?)?,
    };
    let options = asked.places.options(asked.runtime_name);
    print(out, options.dry_run, &install::install(&options, &source)?)
}

pub fn uninstall(out: &mut dyn Write, asked: Uninstall) -> Result<(), CliError> {
    let options = asked.places.options(String::new());
    print(out, options.dry_run, &install::uninstall(&options)?)
}

/// The folder above `bin`, or that of the program.
fn own_folder() -> Result<PathBuf, CliError> {
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let above = folder.parent().filter(|_| folder.ends_with("bin"));
    Ok(above.unwrap_or(folder).to_owned())
}

fn print(out: &mut dyn Write, dry_run: bool, steps: &[String]) -> Result<(), CliError> {
    if dry_run {
        writeln!(out, "would do:")?;
    }
    for step in steps {
        writeln!(out, "{step}")?;
    }
    Ok(())
}
