//! Generates `docs/reference/chart.md`: the values of the Helm chart, from values.yaml and its
//! schema.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::markdown::{Markdown, code, codes, plain};

pub fn page(values: &str, schema: &str) -> Result<String> {
    let comments = comments(values);
    let values: Value = serde_yaml_ng::from_str(values).context("cannot parse values.yaml")?;
    let schema: Value = serde_json::from_str(schema).context("cannot parse values.schema.json")?;
    let mut page = Markdown::page(
        "Helm chart",
        "[values.yaml](../../config/helm/affinode/values.yaml) of the chart and its schema",
    );
    let mut leaves = Vec::new();
    walk(&values, &schema, "", &mut leaves)?;
    let mut group = None;
    let mut rows: Vec<[String; 4]> = Vec::new();
    for leaf in leaves {
        let top = leaf.path.split('.').next().filter(|top| *top != leaf.path).map(str::to_owned);
        if top != group {
            flush(&mut page, &mut rows);
            match &top {
                Some(name) => {
                    page.section(name);
                    page.paragraph(&plain(comments.get(name).map_or("", String::as_str)));
                }
                None => page.section("Others"),
            }
            group = top;
        }
        let comment = comments.get(&leaf.path).map_or("", String::as_str);
        let comment = if comment.is_empty() { leaf.description.as_str() } else { comment };
        rows.push([code(&leaf.path), leaf.accepted, code(&leaf.default), plain(comment)]);
    }
    flush(&mut page, &mut rows);
    Ok(page.finish())
}

fn flush(page: &mut Markdown, rows: &mut Vec<[String; 4]>) {
    page.table(["value", "type", "default", "meaning"], rows);
    rows.clear();
}

struct Leaf {
    path: String,
    accepted: String,
    default: String,
    description: String,
}

/// Collects the chart's values that the page lists. If the schema describes the fields of a value,
/// the page lists these fields and not the value itself. Values without such fields come first.
fn walk(values: &Value, schema: &Value, path: &str, leaves: &mut Vec<Leaf>) -> Result<()> {
    let Some(map) = values.as_object() else { bail!("{path} in values.yaml is not a map") };
    let divided = |name: &str| schema["properties"][name]["properties"].is_object();
    let (inner, plain): (Vec<_>, Vec<_>) = map.iter().partition(|(name, _)| divided(name));
    for (name, value) in plain.into_iter().chain(inner) {
        let of = &schema["properties"][name];
        if of.is_null() {
            bail!("values.schema.json has no {path}{name}");
        }
        if divided(name) {
            walk(value, of, &format!("{path}{name}."), leaves)?;
            continue;
        }
        leaves.push(Leaf {
            path: format!("{path}{name}"),
            accepted: accepted(of),
            default: value.to_string(),
            description: of["description"].as_str().unwrap_or_default().to_owned(),
        });
    }
    Ok(())
}

fn accepted(schema: &Value) -> String {
    if let Some(words) = schema["enum"].as_array() {
        let shown = |word: &Value| {
            word.as_str().filter(|w| !w.is_empty()).map_or("\"\"".into(), str::to_owned)
        };
        return codes(&words.iter().map(shown).collect::<Vec<String>>());
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => {
            kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or ")
        }
        kind => kind.as_str().unwrap_or_default().to_owned(),
    };
    match (schema["minimum"].as_i64(), schema["maximum"].as_i64()) {
        (Some(from), Some(to)) => format!("{kind}, {from} to {to}"),
        (Some(from), None) => format!("{kind}, {from} or more"),
        (None, Some(to)) => format!("{kind}, up to {to}"),
        (None, None) => kind,
    }
}

/// Returns the comment above each key of a YAML text, by the key's path.
fn comments(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let (mut path, mut comment): (Vec<(usize, &str)>, Vec<&str>) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let words = line.trim_start();
        let depth = line.len() - words.len();
        if let Some(words) = words.strip_prefix('#') {
            comment.push(words.trim());
            continue;
        }
        let name = words.split_once(':').map(|(name, _)| name);
        let is_name = |name: &&str| !name.is_empty() && name.chars().all(char::is_alphanumeric);
        if let Some(name) = name.filter(is_name) {
            while path.last().is_some_and(|(outer, _)| *outer >= depth) {
                path.pop();
            }
            path.push((depth, name));
            if !comment.is_empty() {
                let names: Vec<&str> = path.iter().map(|(_, name)| *name).collect();
                found.insert(names.join("."), comment.join(" "));
            }
        }
        comment.clear();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: &str = "# Of a.\na:\n  # Of b.\n  b: 1\n  c: [x]\n# Of d.\nd: \"\"\n";
    const SCHEMA: &str = r#"{"properties": {
        "a": {"type": "object", "properties": {
            "b": {"type": "integer", "minimum": 1}, "c": {"type": "array"}}},
        "d": {"enum": ["", "e"]}}}"#;

    #[test]
    fn values_have_type_default_and_comment() {
        let page = page(VALUES, SCHEMA).unwrap();
        for row in [
            "## a\n\nOf a.\n",
            "| `a.b` | integer, 1 or more | `1` | Of b. |",
            "| `a.c` | array | `[\"x\"]` |  |",
            "| `d` | `\"\"`, `e` | `\"\"` | Of d. |",
        ] {
            assert!(page.contains(row), "{row} is not in {page}");
        }
    }

    #[test]
    fn a_value_without_a_schema_is_an_error() {
        let error = page("x: 1\n", SCHEMA).unwrap_err().to_string();
        assert!(error.contains("no x"), "{error}");
    }
}
