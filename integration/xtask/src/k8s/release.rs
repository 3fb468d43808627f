//! Affinode as the cluster gets it: an image with its programs, and the chart.

use std::{fs, path::PathBuf};

use affinode_e2e::{
    artifacts::{Artifacts, workspace_dir},
    closure, containerd,
    image::{Archive, Layer},
};
use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::plane::Plane;

const REPOSITORY: &str = "localhost/affinode/affinode";
const TAG: &str = "test";
/// What is in the image.
const PROGRAMS: [&str; 3] = ["affinode", "affinode-cluster", "containerd-shim-affinode-v1"];
const LIBRARY: &str = "libaffinode_preload.so";
/// Where it is installed.
pub const NAMESPACE: &str = "affinode-system";
/// Under which name.
pub const RELEASE: &str = "affinode";

/// The chart's folder.
pub fn chart() -> PathBuf {
    workspace_dir().join("config/helm/affinode")
}

/// Makes the image and brings it to the node.
pub fn load_image(plane: &Plane<'_>) -> Result<()> {
    let world = plane.world();
    let mut images = Archive::default();
    let environment = json!({"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]});
    images.image(&format!("{REPOSITORY}:{TAG}"), &layer(world.artifacts())?, &environment)?;
    let archive = world.dir().join("affinode-image.tar");
    images.write(&archive)?;
    world.containerd().import(world.keeper(), "k8s.io", &archive)?;
    fs::remove_file(&archive).context("the image's archive")
}

fn layer(artifacts: &Artifacts) -> Result<Vec<u8>> {
    let mut layer = Layer::base()?;
    let mut libraries = std::collections::BTreeSet::new();
    for name in PROGRAMS {
        let program = artifacts.bin(name)?;
        libraries.extend(closure::libraries(&program)?);
        layer.copy(&program, &PathBuf::from("/usr/local/bin").join(name))?;
    }
    for library in &libraries {
        layer.copy(library, library)?;
    }
    let library = artifacts.lib_dir().join(LIBRARY);
    layer.copy(&library, &PathBuf::from("/usr/local/lib/affinode").join(LIBRARY))?;
    layer.finish()
}

/// What an operator of this cluster would write into a values file. The places are the world's;
/// this node has no systemd.
pub fn values(plane: &Plane<'_>) -> Value {
    let world = plane.world();
    json!({
        "image": {"repository": REPOSITORY, "tag": TAG, "pullPolicy": "Never"},
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
        "dashboards": {"enabled": true},
    })
}

/// Runs helm with the chart and its values.
pub fn helm(plane: &Plane<'_>, words: &[&str]) -> Result<String> {
    let file = plane.world().dir().join("values.json");
    fs::write(&file, values(plane).to_string())?;
    containerd::run(plane.helm().args(words).arg(chart()).arg("--values").arg(file))
}
