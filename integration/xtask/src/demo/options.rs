//! The demo's command line.

use clap::{Args, ValueEnum};

/// What to show, and how.
#[derive(Args)]
pub struct Options {
    /// The GPU to show it on.
    #[arg(long, value_enum, default_value_t = GpuChoice::Auto)]
    pub gpu: GpuChoice,
    /// Print one JSON object and nothing else on standard output.
    #[arg(long)]
    pub json: bool,
    /// Leave it running with the dashboard in reach, until Ctrl-C.
    #[arg(long, conflicts_with = "json")]
    pub dashboard: bool,
}

/// Which GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuChoice {
    /// The machine's own when it has a driver, else the simulated one.
    Auto,
    /// The machine's own.
    Real,
    /// The simulated one.
    Simulated,
}
