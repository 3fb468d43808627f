//! `affinode hint`: sends the controller a hint that a container is idle or busy.

use std::io::Write;

use serde_json::json;

use super::{CliError, OutputFormat, client::ControlClient, say};

/// Report a container to the controller as idle or busy. An idle container is offloaded without
/// waiting for its idle timeout. A busy container stays on the GPU although it makes no CUDA calls.
/// A program in the container can give the same hint: it writes idle or busy into
/// /.affinode/run/hint.
#[derive(Debug, clap::Args)]
pub struct HintArgs {
    /// Name of the container: namespace/pod/container, namespace/id or id. The beginning of one of
    /// these is enough if it is unique.
    container: String,
    /// Reported state of the container. The hint idle ends at the container's next CUDA call. The
    /// hint busy ends after an hour.
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

/// Sends the hint to the controller, and prints the state that the container has afterwards.
pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: HintArgs,
) -> Result<(), CliError> {
    let said = client.hint(asked.container, asked.is == HintState::Busy).await?;
    let words = format!("{}: {}", said.state, said.reason_text);
    say(out, asked.output, &words, &json!({ "state": said.state, "reason_text": said.reason_text }))
}
