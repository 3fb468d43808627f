//! Generates reference pages from the JSON output of the command `affinode reference`.

use serde::Deserialize;

use super::markdown::{Markdown, code, codes, plain};

/// The parsed JSON output of `affinode reference`.
#[derive(Deserialize)]
pub struct Reference {
    configuration: Vec<Key>,
    annotations: Vec<Annotation>,
    reasons: Vec<Reason>,
    checks: Vec<Check>,
    metrics: Vec<Metric>,
    commands: Vec<Command>,
}

/// The commands of the plugin `kubectl affinode`.
#[derive(Deserialize)]
pub struct Commands {
    commands: Vec<Command>,
}

#[derive(Deserialize)]
struct Key {
    section: String,
    name: String,
    #[serde(rename = "type")]
    kind: String,
    accepted: String,
    default: Option<String>,
    environment: String,
    reload: bool,
    namespace: bool,
    annotations: Vec<String>,
    text: String,
}

#[derive(Deserialize)]
struct Annotation {
    name: String,
    accepted: String,
    key: Option<String>,
    limits: Vec<String>,
    text: String,
}

#[derive(Deserialize)]
struct Reason {
    word: String,
    meaning: String,
    cause: String,
    remedy: String,
}

#[derive(Deserialize)]
struct Check {
    group: String,
    name: String,
    meaning: String,
    cause: String,
    remedy: String,
}

#[derive(Deserialize)]
struct Metric {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    labels: Vec<String>,
    help: String,
}

#[derive(Deserialize)]
struct Command {
    name: String,
    about: String,
    after: String,
    usage: String,
    arguments: Vec<Argument>,
}

#[derive(Deserialize)]
struct Argument {
    name: String,
    help: String,
    values: Vec<String>,
    default: String,
    environment: String,
}

/// Turns a text from the code into a sentence. The text may lack the capital letter or the full
/// stop.
fn sentence(text: &str) -> String {
    let text = plain(text);
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return text };
    // If the first word is literal input, its case is kept.
    if text.split(' ').next().is_some_and(|word| word.contains(['/', '_', '='])) {
        return text;
    }
    let end = if text.ends_with(['.', '!', '?']) { "" } else { "." };
    format!("{}{}{end}", first.to_uppercase(), chars.as_str())
}

pub fn configuration(known: &Reference) -> String {
    let mut page = Markdown::page(
        "Configuration",
        "the keys that the controller accepts and the comments of [config/config.toml](../config/config.toml)",
    );
    page.paragraph(
        "The controller reads `/etc/affinode/config.toml`, then the files `/etc/affinode/conf.d/*.toml` in the order of their names, then the environment. For each value the last source applies. An unknown key or an invalid value is an error: a controller does not start with it, and a reload changes nothing. `affinode policy validate FILE` checks a file.",
    );
    page.paragraph(
        "`affinode reload` applies changes of the keys with reload `yes`. Changes of the other keys apply when the controller starts again. `[[policy.namespace]]` sets values for the containers of one namespace, and [annotations](annotations.md) set values for one container.",
    );
    let mut sections: Vec<&str> = Vec::new();
    for key in &known.configuration {
        if !sections.contains(&key.section.as_str()) {
            sections.push(&key.section);
        }
    }
    for section in sections {
        page.section(&format!("[{section}]"));
        let keys: Vec<&Key> =
            known.configuration.iter().filter(|key| key.section == section).collect();
        let rows: Vec<[String; 5]> = keys.iter().map(|key| key_row(key)).collect();
        page.table(["key", "type", "accepted", "default", "reload"], &rows);
        for key in keys {
            page.entry(&format!("{}.{}", key.section, key.name));
            page.paragraph(&plain(&key.text));
            let mut places = vec![format!("Environment: `{}`.", key.environment)];
            if key.namespace {
                places.push("`[[policy.namespace]]`: yes.".into());
            }
            if !key.annotations.is_empty() {
                places.push(format!("Annotation: {}.", codes(&key.annotations)));
            }
            page.paragraph(&places.join(" "));
        }
    }
    page.finish()
}

fn key_row(key: &Key) -> [String; 5] {
    let anchor = format!("{}.{}", key.section, key.name).replace('.', "");
    let default = key.default.as_deref().map_or("not set".to_owned(), code);
    [
        format!("[`{}`](#{anchor})", key.name),
        key.kind.clone(),
        plain(&key.accepted),
        default,
        if key.reload { "yes" } else { "no" }.to_owned(),
    ]
}

pub fn annotations(known: &Reference) -> String {
    let mut page =
        Markdown::page("Annotations", "the parser of annotations and the default configuration");
    page.paragraph(
        "An annotation changes a value of the [configuration](configuration.md) for one container. In Kubernetes, write annotations into the metadata of the pod. Elsewhere, give them to the container with the option `--annotation` of Docker, nerdctl or Podman, or to a [job](jobs.md) with the same option of `affinode run`. Affinode reads the annotations only when the container is created, so a later change has no effect.",
    );
    page.section("Precedence");
    page.paragraph("A value can come from the sources in this list. If several sources set a value, the one that is furthest down applies:");
    page.list(&[
        "the default".into(),
        "the configuration of the node: `config.toml`, `conf.d/*.toml`, environment".into(),
        "`[[policy.namespace]]` in that configuration: the first rule for the container's namespace".into(),
        "the annotation".into(),
        "an operator's command: `affinode pin`, `affinode auto-offload`".into(),
    ]);
    page.paragraph(
        "Affinode ignores an unknown annotation, and an annotation with an invalid value. The container keeps running, and the sources above the annotation in the list apply. `affinode events` and `affinode policy show` then print the accepted names or values.",
    );
    page.section("List");
    let rows: Vec<[String; 4]> = known
        .annotations
        .iter()
        .map(|annotation| {
            let key = annotation.key.as_deref().map_or(String::new(), |key| {
                format!("[`policy.{key}`](configuration.md#policy{key})")
            });
            let limits: Vec<String> = annotation.limits.iter().map(|text| plain(text)).collect();
            [code(&annotation.name), plain(&annotation.accepted), key, limits.join("; ")]
        })
        .collect();
    page.table(["annotation", "accepted", "sets", "limits by the operator"], &rows);
    let special = known.annotations.iter().filter(|annotation| !annotation.text.is_empty());
    let items: Vec<String> =
        special.map(|a| format!("{}: {}", code(&a.name), plain(&a.text))).collect();
    page.list(&items);
    page.finish()
}

pub fn troubleshooting(known: &Reference) -> String {
    let mut page = Markdown::page(
        "Troubleshooting",
        "the reasons in [proto/src/reason.rs](../proto/src/reason.rs) and the checks of `affinode doctor`",
    );
    page.paragraph(
        "`affinode ps` shows the state of each container with a reason, and `affinode events` shows what happened to it. `affinode doctor` checks whether the machine is ready. This page has a section for each reason and each check that these commands print. The [glossary](glossary.md) explains terms such as *idle*, *resident*, *engine* and *mode*. `NAME` in a command stands for the container's name. If a container is missing, see [A container is not in `affinode ps`](operations.md#a-container-is-not-in-affinode-ps).",
    );
    page.section("Reasons");
    for reason in &known.reasons {
        page.entry(&reason.word);
        let meaning = sentence(&reason.meaning);
        explain(&mut page, ["Meaning", "Cause"], &meaning, &reason.cause, &reason.remedy);
    }
    page.section("Doctor checks");
    page.paragraph(
        "`Requires` states what must be true for the check to pass. `Cause of a failure` lists what leads to a warning or a failure of the check.",
    );
    for check in &known.checks {
        page.entry(&format!("{}: {}", check.group, check.name));
        let labels = ["Requires", "Cause of a failure"];
        explain(&mut page, labels, &check.meaning, &check.cause, &check.remedy);
    }
    page.finish()
}

/// The path of a page as texts of the programs name it, and the link to it on the generated pages.
const CAPACITY: (&str, &str) =
    ("docs/operations.md#capacity", "[capacity](operations.md#capacity)");

/// Adds the meaning, the cause and the remedy of an entry to the page. The first of the `labels` is
/// printed before the meaning, and the second before the cause.
fn explain(page: &mut Markdown, labels: [&str; 2], meaning: &str, cause: &str, remedy: &str) {
    let [first, second] = labels;
    page.list(&[
        format!("{first}: {}", plain(meaning)),
        format!("{second}: {}", plain(cause)),
        format!("What to do: {}", plain(remedy).replace(CAPACITY.0, CAPACITY.1)),
    ]);
}

pub fn metrics(known: &Reference) -> String {
    let mut page = Markdown::page(
        "Metrics",
        "the metrics that a controller registers, as `/metrics` prints them",
    );
    page.paragraph(
        "The units are bytes, seconds and ratios from 0 to 1. GPUs have the same labels as in the metrics of NVIDIA's dcgm-exporter, so that series of both exporters can be joined on `UUID`. A histogram has the series `_bucket`, `_sum` and `_count`. The [glossary](../glossary.md) explains terms such as *idle*, *offloaded*, *copier* and *hook*.",
    );
    let rows: Vec<[String; 4]> = known
        .metrics
        .iter()
        .map(|metric| {
            [code(&metric.name), metric.kind.clone(), codes(&metric.labels), sentence(&metric.help)]
        })
        .collect();
    page.table(["metric", "type", "labels", "help"], &rows);
    page.finish()
}

pub fn cli(known: &Reference, plugin: &Commands) -> String {
    let source = "the definitions of the commands `affinode` and `kubectl affinode`";
    let mut page = Markdown::page("Command line", source);
    let status = known.commands.first().map(|command| command.after.as_str()).unwrap_or_default();
    page.paragraph(&sentence(status));
    for (at, command) in known.commands.iter().chain(&plugin.commands).enumerate() {
        page.section(&command.name);
        page.paragraph(&sentence(&command.about));
        page.code(&command.usage);
        let rows: Vec<[String; 4]> = command.arguments.iter().map(argument_row).collect();
        page.table(["argument", "meaning", "default", "environment"], &rows);
        if at > 0 {
            page.paragraph(&plain(&command.after));
        }
    }
    page.finish()
}

fn argument_row(argument: &Argument) -> [String; 4] {
    let mut meaning = sentence(&argument.help);
    if !argument.values.is_empty() {
        meaning += &format!(" One of {}.", codes(&argument.values));
    }
    [code(&argument.name), meaning, code(&argument.default), code(&argument.environment)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_get_a_capital_and_a_full_stop() {
        assert_eq!(sentence("waits for VRAM"), "Waits for VRAM.");
        assert_eq!(sentence("Done."), "Done.");
        assert_eq!(sentence("namespace/id, or id"), "namespace/id, or id");
        assert_eq!(sentence(""), "");
    }

    #[test]
    fn every_reason_and_check_has_a_heading() {
        let text = || "Text.".to_owned();
        let known = Reference {
            configuration: Vec::new(),
            annotations: Vec::new(),
            reasons: vec![Reason {
                word: "no-vram".into(),
                meaning: "m".into(),
                cause: text(),
                remedy: text(),
            }],
            checks: vec![Check {
                group: "GPU".into(),
                name: "driver".into(),
                meaning: text(),
                cause: text(),
                remedy: text(),
            }],
            metrics: Vec::new(),
            commands: Vec::new(),
        };
        let page = troubleshooting(&known);
        assert!(page.contains("\n### no-vram\n\n- Meaning: M.\n- Cause: Text.\n- What to do:"));
        assert!(
            page.contains("\n### GPU: driver\n\n- Requires: Text.\n- Cause of a failure:"),
            "{page}"
        );
    }
}
