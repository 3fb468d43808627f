//! Generates `docs/reference/api.md`: the HTTP API from openapi.yaml, and the control API from
//! control.proto.

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::markdown::{Markdown, code, codes, plain};

/// HTTP methods that openapi.yaml can contain.
const METHODS: [&str; 4] = ["get", "post", "put", "delete"];

pub fn page(openapi: &str, proto: &str) -> Result<String> {
    let http: Value =
        serde_yaml_ng::from_str(openapi).context("cannot parse config/openapi.yaml")?;
    let mut page = Markdown::page(
        "API",
        "[config/openapi.yaml](../../config/openapi.yaml) and [proto/control.proto](../../proto/control.proto)",
    );
    page.section("HTTP");
    page.paragraph(&plain(text(&http["info"]["description"])));
    let paths = http["paths"].as_object().context("config/openapi.yaml has no paths")?;
    let mut rows = Vec::new();
    for (path, item) in paths {
        for method in METHODS.into_iter().filter(|method| item.get(method).is_some()) {
            let operation = &item[method];
            rows.push([
                code(&format!("{} {path}", method.to_uppercase())),
                plain(text(&operation["summary"])),
                parameters(operation),
                statuses(operation),
            ]);
        }
    }
    page.table(["request", "meaning", "parameters", "status"], &rows);
    page.section("HTTP objects");
    for (name, schema) in http["components"]["schemas"].as_object().unwrap_or(&Map::new()) {
        page.entry(name);
        page.paragraph(&plain(text(&schema["description"])));
        let fields = schema["properties"].as_object().cloned().unwrap_or_default();
        let rows: Vec<[String; 3]> = fields
            .iter()
            .map(|(field, schema)| {
                [code(field), type_name(schema), plain(text(&schema["description"]))]
            })
            .collect();
        page.table(["field", "type", "meaning"], &rows);
    }
    page.section("Control API");
    page.paragraph(
        "The commands of `affinode` and the shims use this API. It is served over ttrpc (containerd's small variant of gRPC) on the socket `control.sock` in the run directory. Only root can connect. Each call receives a request message and returns a response message, which proto/control.proto defines.",
    );
    let rows: Vec<[String; 4]> = calls(proto)
        .into_iter()
        .map(|call| {
            [code(&call.name), plain(&call.comment), code(&call.request), code(&call.answer)]
        })
        .collect();
    page.table(["call", "meaning", "request", "response"], &rows);
    Ok(page.finish())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn parameters(operation: &Value) -> String {
    let list = operation["parameters"].as_array().cloned().unwrap_or_default();
    let each = list.iter().map(|parameter| {
        let place = text(&parameter["in"]);
        let about = text(&parameter["description"]);
        let about = if about.is_empty() { String::new() } else { format!(": {}", plain(about)) };
        format!("{} ({place}){about}", code(text(&parameter["name"])))
    });
    each.collect::<Vec<_>>().join("; ")
}

fn statuses(operation: &Value) -> String {
    let answers = operation["responses"].as_object().cloned().unwrap_or_default();
    codes(&answers.keys().collect::<Vec<_>>())
}

/// Returns the name of a schema's type, such as `integer`, `array of Gpu` or `Gpu`.
fn type_name(schema: &Value) -> String {
    if let Some(named) = schema["$ref"].as_str() {
        return named.rsplit('/').next().unwrap_or(named).to_owned();
    }
    if let Some(words) = schema["enum"].as_array() {
        return codes(&words.iter().map(text).collect::<Vec<_>>());
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => {
            format!("array of {}", type_name(&schema["items"]))
        }
        Value::String(name) => name.clone(),
        Value::Array(names) => names.iter().map(text).collect::<Vec<_>>().join(" or "),
        _ => String::new(),
    }
}

struct Call {
    name: String,
    request: String,
    answer: String,
    comment: String,
}

/// Parses the RPC calls of a .proto file, which have the form `rpc Name(Request) returns
/// (Answer);`. Each is returned with the comment above it.
fn calls(proto: &str) -> Vec<Call> {
    let (mut found, mut comment) = (Vec::new(), Vec::new());
    for line in proto.lines().map(str::trim) {
        if let Some(words) = line.strip_prefix("//") {
            comment.push(words.trim());
            continue;
        }
        if let Some(rest) = line.strip_prefix("rpc ") {
            let mut parts = rest.split(['(', ')']);
            let mut part = || parts.next().unwrap_or_default().trim().to_owned();
            let (name, request, _, answer) = (part(), part(), part(), part());
            found.push(Call { name, request, answer, comment: comment.join(" ") });
        }
        comment.clear();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_their_comments() {
        let proto = "service A {\n  // Everything\n  // now.\n  rpc List(Ask) returns (Node);\n  rpc End(E) returns (F);\n}";
        let found = calls(proto);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].comment, "Everything now.");
        assert_eq!((found[0].name.as_str(), found[0].answer.as_str()), ("List", "Node"));
        assert_eq!((found[1].request.as_str(), found[1].comment.as_str()), ("E", ""));
    }

    #[test]
    fn paths_and_types_are_named() {
        let openapi = "info: { description: D }\npaths:\n  /a:\n    get:\n      summary: S\n      parameters: [{ name: p, in: query }]\n      responses: { \"200\": {}, default: {} }\ncomponents:\n  schemas:\n    X: { properties: { gpus: { type: array, items: { $ref: \"#/y/Gpu\" } } } }\n";
        let page = page(openapi, "").unwrap();
        assert!(page.contains("| `GET /a` | S | `p` (query) | `200`, `default` |"), "{page}");
        assert!(page.contains("| `gpus` | array of Gpu |  |"), "{page}");
    }
}
