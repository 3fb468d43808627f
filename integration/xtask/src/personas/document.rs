//! Reads commands from the code blocks of the documents. A comment before a block names the persona
//! (kind of user) that types the commands. So the documents contain the only copy of each command.
//!
//! ```text
//! <!-- persona docker -->         commands that the user types, counted and run
//! <!-- persona docker: look -->   commands that only show the result: run, and not counted
//! ```

use std::fs;

use affinode_e2e::artifacts::workspace_dir;
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

/// Purpose of the commands in a code block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Purpose {
    /// The commands lead to the result. They are counted.
    Step,
    /// The commands only show the result. They are not counted.
    Look,
}

/// A line of a code block, as a shell reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DocLine {
    pub document: String,
    /// Number of the line in the document, counted from 1.
    pub line: usize,
    pub purpose: Purpose,
    /// The text of the line, without its comment.
    pub text: String,
}

impl DocLine {
    /// Number of commands in the line. `cd` is not counted, because it changes only the shell's own
    /// folder.
    pub fn commands(&self) -> usize {
        let parts = self.text.split("&&").flat_map(|part| part.split([';', '|']));
        parts.filter(|part| !part.trim().is_empty() && !part.trim().starts_with("cd ")).count()
    }
}

/// Reads the command lines of a persona from a document of the repository.
pub fn read(document: &str, persona: &str) -> Result<Vec<DocLine>> {
    let text = fs::read_to_string(workspace_dir().join(document))
        .with_context(|| format!("cannot read {document}"))?;
    let lines = parse(document, &text, persona)?;
    ensure!(!lines.is_empty(), "{document} has no block with the comment `persona {persona}`");
    Ok(lines)
}

fn parse(document: &str, text: &str, persona: &str) -> Result<Vec<DocLine>> {
    let step = format!("<!-- persona {persona} -->");
    let look = format!("<!-- persona {persona}: look -->");
    let mut found = Vec::new();
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        let purpose = match line.trim() {
            line if line == step => Purpose::Step,
            line if line == look => Purpose::Look,
            _ => continue,
        };
        let fence = lines.find(|(_, line)| !line.trim().is_empty());
        if !fence.is_some_and(|(_, line)| line.trim_start().starts_with("```")) {
            bail!("{document}:{number}: no code block follows this comment");
        }
        let block: Vec<_> =
            lines.by_ref().take_while(|(_, line)| !line.trim_start().starts_with("```")).collect();
        // In a block with prompts, the other lines are output.
        let prompts = block.iter().any(|(_, line)| line.starts_with("$ "));
        for (line, text) in block {
            let typed = if prompts { text.strip_prefix("$ ").unwrap_or_default() } else { text };
            let text = typed.split(" #").next().unwrap_or_default().trim().to_owned();
            if !text.is_empty() {
                found.push(DocLine { document: document.into(), line, purpose, text });
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Page\n\n<!-- persona one -->\n\n```\ngit clone x && cd x   # once\nrun; go\n```\n\n\
                        <!-- persona two -->\n```\nother\n```\n<!-- persona one: look -->\n```\n$ ps\nNAME\n```\n";

    #[test]
    fn lines_of_one_persona_are_found() -> Result<()> {
        let lines = parse("page.md", PAGE, "one")?;
        let texts: Vec<_> = lines.iter().map(|line| (line.line, &*line.text)).collect();
        assert_eq!(texts, [(6, "git clone x && cd x"), (7, "run; go"), (16, "ps")]);
        assert_eq!(lines[2].purpose, Purpose::Look);
        Ok(())
    }

    #[test]
    fn every_command_but_cd_is_counted() -> Result<()> {
        let counts: Vec<_> = parse("page.md", PAGE, "one")?.iter().map(DocLine::commands).collect();
        assert_eq!(counts, [1, 2, 1]);
        Ok(())
    }

    #[test]
    fn comment_without_a_block_is_an_error() {
        assert!(parse("page.md", "<!-- persona one -->\n\ntext\n", "one").is_err());
    }
}
