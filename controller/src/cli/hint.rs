//! `affinode hint`.

use std::io::Write;

use serde_json::json;

use super::{CliError, Output, client::Client, say};

/// Say that a container is idle now, so that it need not be waited for, or busy, though it
/// calls nothing. Its own programs write the same words into /.affinode/run/hint.
#[derive(Debug, clap::Args)]
pub struct Hint {
    /// namespace/pod/container, namespace/id, id, or the beginning of one.
    container: String,
    /// What it is. idle holds until its next CUDA call, busy for an hour.
    is: Is,
    /// How to print.
    #[arg(short, long, default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Is {
    /// Nothing will be asked of the GPU for a while.
    Idle,
    /// It is in use, or about to be.
    Busy,
}

/// Tells the controller, and prints where the container stands then.
pub async fn run(client: &Client, out: &mut dyn Write, asked: Hint) -> Result<(), CliError> {
    let said = client.hint(asked.container, asked.is == Is::Busy).await?;
    let words = format!("{}: {}", said.state, said.reason_text);
    say(out, asked.output, &words, &json!({ "state": said.state, "reason_text": said.reason_text }))
}
