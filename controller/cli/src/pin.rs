//! `affinode pin`, `affinode unpin` and `affinode auto-offload`: set operator overrides.

use std::io::Write;

use serde_json::json;

use super::{
    CliError, ControllerAddress, OutputFormat, client::ControlClient, move_container, say,
};

/// Turn automatic offloads of this node on or off, and print the setting. While they are off,
/// containers are offloaded only by `affinode offload`. CUDA calls still restore them.
#[derive(Debug, clap::Args)]
pub struct AutoOffloadArgs {
    /// New setting. Without it the command only prints the present setting.
    wanted: Option<OnOff>,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
}

/// Whether containers are offloaded automatically.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum OnOff {
    /// Policies decide when containers are offloaded.
    On,
    /// Containers are offloaded only on request. CUDA calls still restore them.
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
    move_container::tell(out, &target, &response, if pinned { "pinned" } else { "unpinned" })
}
