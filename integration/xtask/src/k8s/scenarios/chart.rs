//! Checks of the Helm chart itself, before anything is installed.

use std::fs;

use affinode_e2e::containerd;
use anyhow::{Result, ensure};

use super::{NAMESPACE, RELEASE, step};
use crate::{
    k8s::{control_plane::Plane, crds, release},
    output,
};

/// Settings that enable all options of the chart. Webhook and admission policy exclude each other.
/// The webhook is enabled here, because the policy is the default.
const ALL_ON: &str = "inject.by=webhook,node.tlsSecret=papers,networkPolicy.enabled=true,\
    serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus,alertRules.enabled=true,\
    dashboards.enabled=true,serviceAccount.name=agents,image.tag=x,inject.optIn=true,\
    node.rollout.maxConcurrent=2,resourceQuota.enabled=true,dra.enabled=true,\
    dra.extendedResourceName=example.com/gpu,\
    serviceMonitor.account.name=p,serviceMonitor.account.namespace=monitoring";

/// Checks the chart with helm lint, the schema, and the API server.
pub fn is_sound(plane: &Plane<'_>) -> Result<()> {
    step("helm lint, values.schema.json, and a dry run by the API server");
    release::helm(plane, &["lint", "--strict"])?;
    for wrong in ["node.restart=sometimes", "node.port=0", "imagee.tag=x", "runtimeClass.name=A_b"]
    {
        let said = plane
            .helm()
            .args(["template", "x"])
            .arg(release::chart())
            .args(["--set", wrong])
            .output()?;
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(said.contains("schema"), "values.schema.json does not reject {wrong}: {said}");
    }
    release::helm(
        plane,
        &["install", RELEASE, "-n", NAMESPACE, "--create-namespace", "--dry-run=server"],
    )?;
    containerd::run(plane.kubectl().args(["create", "namespace", NAMESPACE]))?;
    for definition in crds::all() {
        plane.apply(&definition)?;
    }
    let established = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
    containerd::run(plane.kubectl().args(established))?;
    let every = format!("--set={ALL_ON}");
    let taken = [is_taken(plane, &[])?, is_taken(plane, &[&every])?];
    let kinds = taken.concat();
    for kind in ["servicemonitor", "prometheusrule", "poddisruptionbudget", "networkpolicy"] {
        ensure!(
            kinds.iter().any(|object| object.starts_with(kind)),
            "the chart creates no {kind}, only {kinds:?}"
        );
    }
    containerd::run(plane.kubectl().args(["delete", "crd", "--all"]))?;
    let [usual, all] = taken.map(|objects| objects.len());
    output::note(&format!(
        "the API server accepts {usual} objects, and {all} with every option on"
    ));
    Ok(())
}

/// Sends the objects of the chart to the API server in a dry run. Returns the kind and name of each
/// object that the API server accepts.
fn is_taken(plane: &Plane<'_>, set: &[&str]) -> Result<Vec<String>> {
    let served = ["ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"]
        .map(|kind| format!("--api-versions=admissionregistration.k8s.io/v1/{kind}"));
    // The pod of `helm test` needs the RuntimeClass, which a dry run does not create.
    let mut words = vec!["template", RELEASE, "-n", NAMESPACE, "--skip-tests"];
    words.extend(served.iter().map(String::as_str));
    words.extend(set);
    let file = plane.world().dir().join("rendered.yaml");
    fs::write(&file, release::helm(plane, &words)?)?;
    let dry = ["apply", "--dry-run=server", "--validate=strict", "-o", "name", "-f"];
    let said = containerd::run(plane.kubectl().args(dry).arg(&file))?;
    Ok(said.lines().map(str::to_owned).collect())
}
