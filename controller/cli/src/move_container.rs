//! `affinode offload` and `affinode restore`: move a container's GPU memory and print the result as
//! text.

use std::io::Write;

use affinode_proto::api::control::ActionResponse;
use serde_json::json;

use super::{
    CliError, ControllerAddress, OutputFormat,
    client::ControlClient,
    format,
    progress::{self, MoveDirection},
};

pub async fn offload(
    client: &ControlClient,
    out: &mut dyn Write,
    target: ControllerAddress,
) -> Result<(), CliError> {
    let asked = client.offload(target.container.clone());
    let response =
        progress::during(client, &target.container, MoveDirection::Offload, asked).await?;
    tell(out, &target, &response, "offloaded")
}

pub async fn restore(
    client: &ControlClient,
    out: &mut dyn Write,
    target: ControllerAddress,
) -> Result<(), CliError> {
    let asked = client.restore(target.container.clone());
    let response =
        progress::during(client, &target.container, MoveDirection::Restore, asked).await?;
    tell(out, &target, &response, "restored")
}

pub fn tell(
    out: &mut dyn Write,
    target: &ControllerAddress,
    response: &ActionResponse,
    done: &str,
) -> Result<(), CliError> {
    let structured = matches!(target.output, OutputFormat::Json | OutputFormat::Yaml);
    if structured {
        let object = json!({
            "container": target.container, "done": response.done, "state": response.state, "reason": response.reason,
            "reason_text": response.reason_text, "bytes": response.bytes, "elapsed_ms": response.elapsed_ms,
            "pinned": response.pinned,
        });
        if target.output == OutputFormat::Yaml {
            write!(out, "{}", serde_yaml_ng::to_string(&object)?)?;
        } else {
            writeln!(out, "{object}")?;
        }
    }
    if !response.done {
        let state = if response.state.is_empty() {
            String::new()
        } else {
            format!(" ({})", response.state)
        };
        // The pin is stored although the restore failed. The text says both.
        if response.pinned {
            let (name, text) = (&target.container, &response.reason_text);
            return Err(CliError::NotDone(format!("{name}{state}: {text}")));
        }
        return Err(CliError::NotDone(format!(
            "{} was not {done}{state}: {}",
            target.container, response.reason_text
        )));
    }
    if !structured {
        let moved = if response.bytes == 0 {
            String::new()
        } else {
            format!(
                ", {} in {}",
                format::bytes(response.bytes),
                format::duration(response.elapsed_ms)
            )
        };
        writeln!(out, "{} is {done}{moved}", target.container)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_container_is_not_called_unpinned() {
        let target = ControllerAddress { container: "web".into(), output: OutputFormat::Table };
        let said = |pinned, text: &str| {
            let (state, reason_text) = ("offloaded".into(), text.into());
            let response =
                ActionResponse { pinned, state, reason_text, ..ActionResponse::default() };
            tell(&mut Vec::new(), &target, &response, "pinned").unwrap_err().to_string()
        };
        let text = "the container is pinned, but is not restored yet: waits for VRAM";
        assert_eq!(said(true, text), format!("web (offloaded): {text}"));
        assert_eq!(said(false, "no disk"), "web was not pinned (offloaded): no disk");
    }
}
