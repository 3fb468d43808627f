//! Removes a handler from a configuration file by its place in the TOML tree. All other content
//! stays unchanged, if possible byte for byte.

use std::ops::Range;

use toml::{Table, Value};
use toml_edit::{DocumentMut, ImDocument, Item, TableLike};

use super::{block, handler};
use crate::doctor::handler::PLUGINS;

/// Returns the text without the handler. `None`: the handler cannot be removed without a change of
/// other content.
pub fn without(text: &str, name: &str) -> Option<String> {
    let expected = pruned(text.parse::<Table>().ok()?, name);
    let right = |text: &String| {
        text.parse::<Table>().is_ok_and(|after| {
            handler::handler_of(&after, name).is_none() && pruned(after, name) == expected
        })
    };
    cut(text, name).filter(right).or_else(|| rewritten(text, name).filter(right))
}

/// Returns the text without the lines that define the handler's tables.
fn cut(text: &str, name: &str) -> Option<String> {
    let document = ImDocument::parse(text).ok()?;
    let mut spans = Vec::new();
    for plugin in PLUGINS {
        let runtimes = ["plugins", plugin, "containerd", "runtimes"]
            .iter()
            .try_fold(document.as_item(), |item, key| item.as_table_like()?.get(key));
        let Some(table) = runtimes.and_then(Item::as_table_like) else { continue };
        let Some((key, item)) = table.get_key_value(name) else { continue };
        match item.as_table() {
            Some(table) => collect(table, &mut spans),
            None => spans.push(key.span()?.start..item.span()?.end),
        }
    }
    let mut lines: Vec<Range<usize>> = spans.into_iter().map(|span| lines_of(text, span)).collect();
    lines.sort_by_key(|range| range.start);
    let mut kept = String::new();
    let mut at = 0;
    for range in lines {
        let range = with_marks(text, range);
        kept.push_str(text.get(at..range.start.max(at))?);
        at = range.end.max(at);
    }
    kept.push_str(text.get(at..)?);
    Some(kept)
}

/// Collects the byte ranges of a table's header and values, and of the tables below it.
fn collect(table: &toml_edit::Table, spans: &mut Vec<Range<usize>>) {
    spans.extend(table.span());
    for (name, item) in table.iter() {
        let key = table.key(name).and_then(toml_edit::Key::span);
        match (item.as_table(), key, item.span()) {
            (Some(table), ..) => collect(table, spans),
            // A value of a dotted key, which has no header.
            (None, Some(key), Some(value)) => spans.push(key.start..value.end),
            _ => {}
        }
    }
}

/// Extends a byte range to whole lines.
fn lines_of(text: &str, span: Range<usize>) -> Range<usize> {
    let start = text[..span.start].rfind('\n').map_or(0, |end| end + 1);
    let end = text[span.end..].find('\n').map_or(text.len(), |end| span.end + end + 1);
    start..end
}

/// Extends a range of lines by the first and last line of Affinode's block, if these are directly
/// next to the range.
fn with_marks(text: &str, lines: Range<usize>) -> Range<usize> {
    let mark = |mark: &str, line: &str| line.trim() == mark.trim();
    let before = text[..lines.start].trim_end_matches(['\r', '\n']);
    let line = before.rfind('\n').map_or(0, |end| end + 1);
    let start = if mark(block::BEGIN, &before[line..]) { line } else { lines.start };
    let after = text[lines.end..].split_inclusive('\n').next().unwrap_or_default();
    let end = if mark(block::END, after) { lines.end + after.len() } else { lines.end };
    start..end
}

/// Parses the text, removes the handler from the tree, and returns the tree as text. Comments and
/// order are kept.
fn rewritten(text: &str, name: &str) -> Option<String> {
    let mut document: DocumentMut = text.parse().ok()?;
    for plugin in PLUGINS {
        let runtimes = ["plugins", plugin, "containerd", "runtimes"]
            .iter()
            .try_fold(document.as_item_mut(), |item, key| item.as_table_like_mut()?.get_mut(key));
        if let Some(table) = runtimes.and_then(Item::as_table_like_mut) {
            TableLike::remove(table, name);
        }
    }
    Some(document.to_string())
}

/// Returns the tree without the handler. Tables above the handler are also removed if they become
/// empty.
fn pruned(config: Table, name: &str) -> Table {
    fn prune(table: &mut Table, way: &[&str], name: &str) {
        let [key, deeper @ ..] = way else {
            table.remove(name);
            return;
        };
        if let Some(Value::Table(inner)) = table.get_mut(*key) {
            prune(inner, deeper, name);
            if inner.is_empty() {
                table.remove(*key);
            }
        }
    }
    let mut config = config;
    for plugin in PLUGINS {
        prune(&mut config, &["plugins", plugin, "containerd", "runtimes"], name);
    }
    config
}

#[cfg(test)]
mod tests;
