//! `affinode top`: shows the GPUs and containers of the node in a terminal, updated live.
//!
//! ```text
//!  keys (a thread) ────┐
//!  node, every second ─┼──> [`state::TopState`] (pure) ──> [`view`] draws it
//!  results of moves ───┘
//! ```

mod source;
mod state;
mod view;

use std::{io::IsTerminal, path::PathBuf, sync::Arc, time::Duration};

use ratatui::crossterm::event::{self, Event};
use tokio::sync::mpsc;

use super::{CliError, client::ControlClient, format};
use source::NodeSource;
use state::{ContainerAction, KeyOutcome, TopState};

const SECOND: Duration = Duration::from_secs(1);

pub async fn run(run_dir: PathBuf) -> Result<(), CliError> {
    if !std::io::stdout().is_terminal() {
        return Err(CliError::NotDone(
            "`affinode top` needs a terminal; without a terminal, use `affinode ps -w`".into(),
        ));
    }
    let mut source = NodeSource::open(run_dir).await?;
    let mut terminal = ratatui::try_init()?;
    // The terminal is restored after success and after an error.
    let outcome = live(&mut source, &mut terminal).await;
    ratatui::restore();
    outcome
}

async fn live(
    source: &mut NodeSource,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), CliError> {
    let (typed, mut keys) = mpsc::channel(64);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if typed.blocking_send(event).is_err() {
                return;
            }
        }
    });
    let (told, mut answers) = mpsc::channel(16);
    let mut state = TopState::default();
    let mut beat = tokio::time::interval(SECOND);
    loop {
        tokio::select! {
            _ = beat.tick() => match source.read().await {
                Ok(node) => state.show(node),
                // A controller that restarts responds again in a moment.
                Err(error) => state.say(error.to_string()),
            },
            Some(answer) = answers.recv() => state.say(answer),
            key = keys.recv() => match key {
                None => return Ok(()),
                Some(Event::Key(key)) => match state.key(key) {
                    KeyOutcome::End => return Ok(()),
                    KeyOutcome::Stay => {}
                    KeyOutcome::Act { container, key, what } => {
                        // Without a controller there is no container to choose.
                        let Some(client) = source.client() else { continue };
                        state.say(format!("{container}: requested"));
                        let (client, told) = (Arc::clone(client), told.clone());
                        tokio::spawn(async move {
                            let _ = told.send(act(&client, container, key, what).await).await;
                        });
                    }
                },
                Some(_) => {}
            },
        }
        terminal.draw(|frame| view::draw(frame, &state))?;
    }
}

async fn act(
    client: &ControlClient,
    container: String,
    key: String,
    what: ContainerAction,
) -> String {
    let answer = match what {
        ContainerAction::Offload => client.offload(key).await,
        ContainerAction::Restore => client.restore(key).await,
        ContainerAction::Pin(pinned) => client.pin(key, pinned).await,
    };
    let moved = |bytes, ms| format!("{} in {}", format::bytes(bytes), format::duration(ms));
    match (answer, what) {
        (Ok(said), ContainerAction::Offload) if said.done => {
            format!("{container} is offloaded: {}", moved(said.bytes, said.elapsed_ms))
        }
        (Ok(said), ContainerAction::Restore) if said.done => {
            format!("{container} is restored: {}", moved(said.bytes, said.elapsed_ms))
        }
        (Ok(said), ContainerAction::Pin(true)) if said.done => format!("{container} is pinned"),
        (Ok(said), ContainerAction::Pin(false)) if said.done => {
            format!("{container} is unpinned")
        }
        (Ok(said), _) => {
            format!("{container} was not changed: {}", format::safe(&said.reason_text))
        }
        (Err(error), _) => error.to_string(),
    }
}
