//! The command line options of the demo.

use clap::{Args, ValueEnum};

/// GPU and output of the demo.
#[derive(Args)]
pub struct Options {
    /// The GPU that the demo uses.
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
    /// The machine's GPU if it has a driver, otherwise the simulated GPU.
    Auto,
    /// The GPU of the machine.
    Real,
    /// The simulated GPU only.
    Simulated,
}
