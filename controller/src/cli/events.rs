//! `affinode events`.

use std::io::Write;

use super::{CliError, Output, client::Client, format};
use crate::schema;

pub async fn run(
    client: &Client,
    out: &mut dyn Write,
    output: Output,
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
            if output == Output::Json {
                writeln!(out, "{}", serde_json::to_string(&event)?)?;
            } else if output == Output::Yaml {
                write!(out, "---\n{}", serde_yaml_ng::to_string(&event)?)?;
            } else {
                writeln!(out, "{}", line(&event))?;
            }
        }
    }
}

fn line(event: &schema::Event) -> String {
    let mut text =
        format!("{}  {}  ", format::clock(event.unix_ms), format::safe(&event.container));
    if event.kind == "state" {
        text.push_str(&format!("{} -> {}", event.from, event.to));
        if event.bytes > 0 {
            text.push_str(&format!(
                "  {} in {}",
                format::bytes(event.bytes),
                format::duration(event.elapsed_ms)
            ));
        }
    } else {
        text.push_str(&event.kind);
    }
    if !event.text.is_empty() {
        text.push_str(&format!("  ({})", format::safe(&event.text)));
    }
    text
}
