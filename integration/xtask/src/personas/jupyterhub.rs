//! Plays an administrator of JupyterHub without a cluster: KubeSpawner creates the manifests of
//! pods from the values that the documents name.

use std::{collections::BTreeMap, fs, path::PathBuf, process::Command};

use affinode_e2e::artifacts::{Artifacts, workspace_dir};
use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Outcome, document::DocLine};
use crate::{output, sh};

const PAGE: &str = "docs/jupyterhub.md";
/// Release of KubeSpawner, which creates the pods. It is fetched from Python's package index.
const SPAWNER: &str = "jupyterhub-kubespawner==7.1.0";
const PROGRAM: &str = "integration/jupyterhub/pods.py";
/// Option of the helm command that names the file of values.
const VALUES: &str = "--values ";

/// Checks the pods that KubeSpawner creates from two sets of values: those in the file that the
/// helm command `upgrade` names, and those on the page `docs/jupyterhub.md`.
pub fn check(upgrade: &DocLine, artifacts: &Artifacts) -> Result<Outcome> {
    let named = upgrade.text.split(VALUES).nth(1).context("the command names no values")?;
    let python = python(artifacts)?;
    let pods = pods(&python, &workspace_dir().join(named.trim()))?;
    let gpu: Vec<_> = pods.iter().filter(|(_, pod)| has_gpu(pod)).collect();
    ensure!(gpu.len() == 2 && pods.len() == 3, "{:?}", pods.keys());
    for (profile, pod) in &gpu {
        is_managed(pod).with_context(|| format!("profile {profile}"))?;
    }
    for (profile, pod) in pods.iter().filter(|(_, pod)| !has_gpu(pod)) {
        let class = &pod["spec"]["runtimeClassName"];
        ensure!(class.is_null(), "profile {profile} without a GPU has the class {class}");
    }
    let annotation = |name: &str| -> Vec<&str> {
        let annotations = gpu.iter().map(|(_, pod)| &pod["metadata"]["annotations"]);
        annotations.filter_map(|annotations| annotations[name].as_str()).collect()
    };
    ensure!(annotation("affinode.io/idle-timeout") == ["5m"], "the shared GPU has no timeout");
    ensure!(annotation("affinode.io/offload") == ["off"], "no profile stays on the GPU");

    let file = artifacts.root().join("jupyterhub-values.yaml");
    fs::write(&file, values_of_the_page()?)?;
    for pod in self::pods(&python, &file)?.values() {
        ensure!(has_gpu(pod), "the values of the page give no GPU");
        is_managed(pod)?;
    }
    fs::remove_file(file)?;
    Ok(Outcome::Checked(format!("{SPAWNER} makes the pods of {} profiles", pods.len())))
}

/// Returns the first block of values on the page `docs/jupyterhub.md`. These values are for a hub
/// without profiles.
fn values_of_the_page() -> Result<String> {
    let text = fs::read_to_string(workspace_dir().join(PAGE))?;
    let block = text.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next());
    Ok(block.with_context(|| format!("{PAGE} has no values"))?.to_owned())
}

fn has_gpu(pod: &Value) -> bool {
    pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
}

/// Checks that the pod has the runtime class, and a memory limit above its memory request.
fn is_managed(pod: &Value) -> Result<()> {
    ensure!(pod["spec"]["runtimeClassName"] == "affinode", "no class: {}", pod["spec"]);
    let resources = &pod["spec"]["containers"][0]["resources"];
    let bytes = |of: &str| resources[of]["memory"].as_u64().context("no memory");
    ensure!(bytes("limits")? > bytes("requests")?, "{resources}");
    let annotations = pod["metadata"]["annotations"].as_object().context("no annotations")?;
    ensure!(annotations.keys().any(|name| name.starts_with("affinode.io/")), "{annotations:?}");
    Ok(())
}

/// Returns the pods that KubeSpawner creates from the repository's values, by profile.
pub fn pods_of_the_repository(artifacts: &Artifacts) -> Result<BTreeMap<String, Value>> {
    pods(&python(artifacts)?, &workspace_dir().join("config/jupyterhub/values.yaml"))
}

fn pods(python: &PathBuf, values: &PathBuf) -> Result<BTreeMap<String, Value>> {
    let mut program = Command::new(python);
    program.arg(workspace_dir().join(PROGRAM)).arg(values);
    let said = sh::read(&mut program)?;
    serde_json::from_str(&said).context("cannot parse the pods")
}

/// Returns the path of a Python that has KubeSpawner, in an environment of its own.
fn python(artifacts: &Artifacts) -> Result<PathBuf> {
    let folder = artifacts.cache_dir().join("kubespawner");
    let python = folder.join("bin/python");
    let installed = folder.join("installed");
    if !fs::read_to_string(&installed).is_ok_and(|known| known == SPAWNER) {
        output::step("Installing KubeSpawner (once)");
        sh::run(Command::new("python3").args(["-m", "venv"]).arg(&folder))
            .context("install python3 with its module venv")?;
        sh::run(Command::new(&python).args(["-m", "pip", "install", "--quiet", SPAWNER]))?;
        fs::write(installed, SPAWNER)?;
    }
    Ok(python)
}
