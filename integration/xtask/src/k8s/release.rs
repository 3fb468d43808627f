//! Affinode as the cluster gets it: an image with its programs, and the chart.

use std::{fs, path::PathBuf};

use affinode_e2e::{artifacts::workspace_dir, containerd};
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::plane::Plane;
use crate::package;

/// Where it is installed.
pub const NAMESPACE: &str = "affinode-system";
/// Under which name.
pub const RELEASE: &str = "affinode";

/// The chart's folder.
pub fn chart() -> PathBuf {
    workspace_dir().join("config/helm/affinode")
}

/// Makes the image as it is released, of programs of this build, and brings it to the node.
pub fn load_image(plane: &Plane<'_>) -> Result<()> {
    let world = plane.world();
    let archive = world.dir().join("affinode-image.tar");
    fs::write(&archive, package::image_of(world.artifacts())?)?;
    world.containerd().import(world.keeper(), "k8s.io", &archive)?;
    fs::remove_file(&archive).context("the image's archive")
}

/// What an operator of this cluster would write into a values file. The places are the world's;
/// this node has no systemd.
pub fn values(plane: &Plane<'_>) -> Value {
    let world = plane.world();
    json!({
        // Its name is the chart's default.
        "image": {"repository": "affinode/affinode", "pullPolicy": "Never"},
        "policy": {"mode": "eager", "idle_timeout": "2s"},
        "node": {
            "restart": "none",
            // The first process of this node is the world's keeper.
            "hostRoot": format!("/proc/{}/root", world.keeper().pid()),
            "containerdSocket": world.containerd().socket(),
            "prefix": world.prefix(),
            "stateDir": world.dir().join("state-affinode"),
            "runDir": world.dir().join("run"),
            "configDir": world.dir().join("affinode"),
            "drain": "2s",
        },
        // Of the two, one would wait: there is one node.
        "inject": {"webhook": {"replicas": 1}},
        "fleet": {"enabled": true},
        "dashboards": {"enabled": true},
    })
}

/// Runs helm with the chart and its values.
pub fn helm(plane: &Plane<'_>, words: &[&str]) -> Result<String> {
    let file = plane.world().dir().join("values.json");
    fs::write(&file, values(plane).to_string())?;
    containerd::run(plane.helm().args(words).arg(chart()).arg("--values").arg(file))
}
