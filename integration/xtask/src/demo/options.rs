//! The demo's command line.

use clap::{Args, ValueEnum};

/// GPU and output of the demo.
#[derive(Args)]
pub struct Options {
    /// The GPU to show it on.
    #[arg(long, value_enum, default_value_t = GpuChoice::Auto)]
    pub gpu: GpuChoice,
    /// Print one JSON object and nothing else on standard output.
    #[arg(long)]
    pub json: bool,
    /// Keep running with the dashboard available, until Ctrl-C.
    #[arg(long, conflicts_with = "json")]
    pub dashboard: bool,
}

/// Which GPU to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuChoice {
    /// The machine's own when it has a driver, else the simulated one.
    Auto,
    /// The machine's own GPU.
    Real,
    /// The simulated GPU only.
    Simulated,
}
