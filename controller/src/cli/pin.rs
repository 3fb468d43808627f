//! `affinode pin`, `unpin` and `auto-offload`.

use std::io::Write;

use serde_json::json;

use super::{
    CliError, ControllerAddress, OutputFormat, client::ControlClient, move_container, say,
};

/// Turn offloads that nobody asks for on or off, on this node; print which it is.
#[derive(Debug, clap::Args)]
pub struct AutoOffloadArgs {
    /// on or off; left out: only print.
    wanted: Option<OnOff>,
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OnOff {
    /// Policies decide.
    On,
    /// Containers move when they are asked to, or called.
    Off,
}

pub async fn auto_offload(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: AutoOffloadArgs,
) -> Result<(), CliError> {
    let on = match asked.wanted {
        Some(wanted) => {
            let on = wanted == OnOff::On;
            client.set_auto_offload(on).await?;
            on
        }
        None => client.list().await?.auto_offload,
    };
    let words = format!("auto-offload is {}", if on { "on" } else { "off" });
    say(out, asked.output, &words, &json!({ "auto_offload": on }))
}

pub async fn pin(
    client: &ControlClient,
    out: &mut dyn Write,
    target: ControllerAddress,
    pinned: bool,
) -> Result<(), CliError> {
    let response = client.pin(target.container.clone(), pinned).await?;
    move_container::tell(
        out,
        &target,
        &response,
        if pinned { "pinned" } else { "free to be offloaded" },
    )
}
