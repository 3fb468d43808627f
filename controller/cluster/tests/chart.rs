//! Compares the chart in `config/helm/affinode` with the programs that the chart runs, and with the
//! plain manifests. `cargo xtask k8s` tests the manifests that helm renders from the chart.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::{fs, path::Path, process::Command};

fn config(file: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config");
    fs::read_to_string(folder.join(file)).unwrap()
}

fn template(name: &str) -> String {
    config(&format!("helm/affinode/templates/{name}.yaml"))
}

fn help(command: &str) -> String {
    let program = env!("CARGO_BIN_EXE_affinode-cluster");
    let output = Command::new(program).args([command, "--help"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the part of a text from the string `from` to the next occurrence of the string `to`.
fn part<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let from = text.find(from).unwrap();
    &text[from..from + text[from..].find(to).unwrap()]
}

#[test]
fn chart_passes_only_existing_options() {
    for (file, command) in [("daemonset", "node"), ("uninstall", "retire"), ("webhook", "webhook")]
    {
        let (help, text) = (help(command), template(file));
        let given =
            text.lines().filter_map(|line| line.trim().strip_prefix("- --")?.split('=').next());
        let mut seen = 0;
        for option in given {
            assert!(help.contains(&format!("--{option} <")), "{file}: --{option}");
            seen += 1;
        }
        assert!(seen > 3, "{file} gives {seen} options");
    }
}

#[test]
fn the_chart_is_of_the_version_of_its_programs() {
    let chart = config("helm/affinode/Chart.yaml");
    let version = env!("CARGO_PKG_VERSION");
    assert!(chart.contains(&format!("appVersion: \"{version}\"")), "{chart}");
}

#[test]
fn policy_of_chart_and_manifest_look_at_the_same() {
    let (ours, theirs) = (template("admission-policy"), config("kubernetes/admission-policy.yaml"));
    let conditions = |text: &str| part(text, "    - name: wants-the-library", "---").to_owned();
    assert_eq!(conditions(&ours), conditions(&theirs));
}

#[test]
fn webhook_rules_of_chart_and_manifest_agree() {
    let (ours, theirs) = (template("webhook"), config("kubernetes/webhook.yaml"));
    let rules = |text: &str| part(text, "    rules:", "scope: Namespaced").to_owned();
    assert_eq!(rules(&ours), rules(&theirs));
    let terms =
        |text: &str| part(text, "    admissionReviewVersions", "    clientConfig").to_owned();
    assert_eq!(terms(&ours), terms(&theirs));
    let values = config("helm/affinode/values.yaml");
    let help = help("webhook");
    for option in ["resource", "device-class"] {
        let (_, after) = help.split_once(&format!("--{option} ")).unwrap();
        let (_, defaults) = after.split_once("[default: ").unwrap();
        for name in defaults.split_once(']').unwrap().0.split([' ', ',']).filter(|n| !n.is_empty())
        {
            assert!(values.contains(name), "{option}: {name}");
        }
    }
}

#[test]
fn user_roles_of_chart_and_manifest_agree() {
    let (ours, theirs) = (template("rbac"), config("kubernetes/dashboard.yaml"));
    for urls in theirs.lines().filter(|line| line.contains("nonResourceURLs")) {
        assert!(ours.contains(urls), "{urls}");
    }
}
