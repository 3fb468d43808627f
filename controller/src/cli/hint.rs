//! `affinode hint`.

use std::io::Write;

use serde_json::json;

use super::{CliError, OutputFormat, client::ControlClient, say};

/// Say that a container is idle now, so that it need not be waited for, or busy, though it
/// calls nothing. Its own programs write the same words into /.affinode/run/hint.
#[derive(Debug, clap::Args)]
pub struct HintArgs {
    /// namespace/pod/container, namespace/id, id, or the beginning of one.
    container: String,
    /// What it is. idle holds until its next CUDA call, busy for an hour.
    is: HintState,
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: OutputFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum HintState {
    /// Nothing will be asked of the GPU for a while.
    Idle,
    /// It is in use, or about to be.
    Busy,
}

/// Tells the controller, and prints where the container stands then.
pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    asked: HintArgs,
) -> Result<(), CliError> {
    let said = client.hint(asked.container, asked.is == HintState::Busy).await?;
    let words = format!("{}: {}", said.state, said.reason_text);
    say(out, asked.output, &words, &json!({ "state": said.state, "reason_text": said.reason_text }))
}
