//! `affinode hint`: sends the controller a hint that a container is idle or busy.

use std::io::Write;

use serde_json::json;

use super::{CliError, OutputFormat, client::ControlClient, say};

/// Report a container to the controller as idle or busy. idle: it is offloaded without waiting for
/// its idle timeout. busy: it stays resident although it makes no calls. The container itself can
/// write the same words into /.affinode/run/hint.
#[derive(Debug, clap::Args)]
pub struct HintArgs {
    /// namespace/pod/container, namespace/id, id, or the beginning of one of these.
    container: String,
    /// State of the container. idle applies until its next CUDA call, busy for an hour.
    is: HintState,
    /// Format of the output.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum HintState {
    /// The container will not use the GPU for a while.
    Idle,
    /// The container uses the GPU, or is about to.
    Busy,
}

/// Sends the hint, and prints the container's state after it.
pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: HintArgs,
) -> Result<(), CliError> {
    let said = client.hint(asked.container, asked.is == HintState::Busy).await?;
    let words = format!("{}: {}", said.state, said.reason_text);
    say(out, asked.output, &words, &json!({ "state": said.state, "reason_text": said.reason_text }))
}
