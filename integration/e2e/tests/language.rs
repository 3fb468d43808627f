//! The language of the project: counts that only go down, links that lead somewhere, documents
//! that stay short.

use std::fs;

use affinode_e2e::{
    artifacts::workspace_dir,
    language::{self, LIMITS_FILE},
};
use anyhow::Result;

#[test]
fn avoided_words_only_become_fewer() -> Result<()> {
    let root = workspace_dir();
    let limits = language::parse_limits(&fs::read_to_string(root.join(LIMITS_FILE))?)?;
    let counts = language::count(&root)?;
    let above = language::above(&limits, &counts);
    assert!(above.is_empty(), "more than before; write it otherwise:\n{}", above.join("\n"));
    let slack = language::slack(&limits, &counts);
    let hint = "fewer than the limit; run `cargo xtask docs --limits`";
    assert!(slack.is_empty(), "{hint}:\n{}", slack.join("\n"));
    Ok(())
}
