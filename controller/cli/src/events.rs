//! `affinode events`: prints the events of the controller.

use std::io::Write;

use affinode_controller::schema;
use affinode_proto::{api::control::Event, event::EventKind};

use super::{CliError, OutputFormat, client::ControlClient, format};

pub async fn run(
    client: &ControlClient,
    out: &mut dyn Write,
    output: OutputFormat,
    follow: bool,
) -> Result<(), CliError> {
    let mut last = 0;
    loop {
        let events = client.events(last, if follow { 30_000 } else { 0 }).await?;
        if events.is_empty() && !follow {
            return Ok(());
        }
        for event in events {
            last = event.sequence;
            let event = schema::Event::from(event);
            if output == OutputFormat::Json {
                writeln!(out, "{}", serde_json::to_string(&event)?)?;
            } else if output == OutputFormat::Yaml {
                write!(out, "---\n{}", serde_yaml_ng::to_string(&event)?)?;
            } else {
                writeln!(out, "{}", line(&event, output == OutputFormat::Wide))?;
            }
        }
    }
}

/// Waits for an event with a sequence number above `after`, and returns the number of the latest
/// event. If `after` is `None`, waits for an event that is newer than all events at the time of the
/// call.
pub async fn next(client: &ControlClient, after: Option<u64>) -> Result<u64, CliError> {
    let number = |events: &[Event]| events.last().map(|event| event.sequence);
    let mut last = match after {
        Some(after) => after,
        None => number(&client.events(0, 0).await?).unwrap_or(0),
    };
    loop {
        // One response has all events up to now.
        last = match number(&client.events(last, 30_000).await?) {
            Some(news) => return Ok(news),
            None => last,
        };
    }
}

/// Formats one event as a line. `wide` adds the event's date, its sequence number, the key of its
/// container and its reason word.
fn line(event: &schema::Event, wide: bool) -> String {
    let container = format::safe(&event.container);
    let mut text = format!("{}  {container}  ", format::clock(event.unix_ms));
    if wide {
        let or_none = |text: &str| if text.is_empty() { "-".into() } else { format::safe(text) };
        text = format!(
            "{} {text}{}  {}  {}  ",
            format::date(event.unix_ms),
            event.sequence,
            or_none(&event.key),
            or_none(&event.reason),
        );
    }
    if event.kind == EventKind::State.as_str() {
        text.push_str(&format!("{} -> {}", event.from, event.to));
        if event.bytes > 0 {
            text.push_str(&format!("  {}", format::bytes(event.bytes)));
            // 0: no call waited for the move.
            if event.elapsed_ms > 0 {
                text.push_str(&format!(" in {}", format::duration(event.elapsed_ms)));
            }
        }
    } else {
        text.push_str(&event.kind);
    }
    if !event.text.is_empty() {
        text.push_str(&format!("  ({})", format::safe(&event.text)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_adds_columns() {
        let event = schema::Event {
            sequence: 7,
            unix_ms: 86_400_000 * 365,
            kind: "state".into(),
            key: "ab".into(),
            container: "ml/a\u{1b}".into(),
            from: "Idle".into(),
            to: "Closing".into(),
            reason: "idle-timeout".into(),
            ..schema::Event::default()
        };
        assert_eq!(line(&event, false), "00:00:00.000  ml/a?  Idle -> Closing");
        let wide = "1971-01-01 00:00:00.000  ml/a?  7  ab  idle-timeout  Idle -> Closing";
        assert_eq!(line(&event, true), wide);
    }
}
