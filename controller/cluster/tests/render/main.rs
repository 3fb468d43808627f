//! Tests of the objects that helm renders from the chart in `config/helm/affinode`, without a
//! cluster.

#![allow(clippy::unwrap_used)] // Helpers of tests.

mod config;
mod device_plugin;
mod dra;
mod inject;
mod monitoring;
mod nodes;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Deserialize;
use serde_json::Value;

/// Version of Kubernetes that serves all APIs of the chart.
const NEWEST: &str = "1.36.0";
/// API whose presence the chart checks. Kubernetes [`NEWEST`] serves it.
const POLICY: &str = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy";

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/helm/affinode")
}

/// The objects that helm rendered from the chart.
struct Rendered(Vec<Value>);

impl Rendered {
    fn find(&self, kind: &str, name: &str) -> Option<&Value> {
        self.0.iter().find(|o| o["kind"] == kind && o["metadata"]["name"] == name)
    }

    fn get(&self, kind: &str, name: &str) -> &Value {
        self.find(kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))
    }
}

/// Renders the chart with the text of a values file, as `helm install -f` reads it. `None`: helm is
/// not installed.
fn render(values: &str) -> Option<Rendered> {
    render_for(NEWEST, values).map(|rendered| rendered.unwrap_or_else(|error| panic!("{error}")))
}

/// Renders the chart for a version of Kubernetes. `Err` contains the output of helm. `None`: helm
/// is not installed.
fn render_for(kubernetes: &str, values: &str) -> Option<Result<Rendered, String>> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    let mut helm = Command::new("helm");
    helm.args(["template", "affinode"]).arg(chart()).args(["-n", "affinode-system"]);
    helm.args(["--kube-version", kubernetes, "--set", "image.repository=example.com/affinode"]);
    if kubernetes == NEWEST {
        helm.args(["--api-versions", POLICY]);
    }
    // Helm gets only PATH from the environment, so that no setting of the user changes the result.
    let path = std::env::var_os("PATH").unwrap_or_default();
    helm.arg("-f").arg(&file).env_clear().env("PATH", path).stdin(Stdio::null());
    let Ok(output) = helm.output() else {
        affinode_test_notes::skip("helm", "helm is missing, and Go to build it");
        return None;
    };
    if !output.status.success() {
        return Some(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let read = |document| Value::deserialize(document).unwrap();
    let objects = serde_yaml_ng::Deserializer::from_str(&text).map(read);
    Some(Ok(Rendered(objects.filter(|object: &Value| object.is_object()).collect())))
}

/// Returns the only object of this kind in a manifest of `config/kubernetes`.
fn manifest(file: &str, kind: &str) -> Value {
    let text = std::fs::read_to_string(chart().join("../../kubernetes").join(file)).unwrap();
    let read = |document| Value::deserialize(document).unwrap();
    let mut objects = serde_yaml_ng::Deserializer::from_str(&text).map(read);
    objects.find(|object: &Value| object["kind"] == kind).unwrap()
}
