//! Plays a platform engineer without a Kubernetes cluster: the image is built and copied, and the
//! chart is rendered. `cargo xtask k8s` installs the chart.

use std::{fs, path::Path};

use affinode_e2e::{artifacts::Artifacts, release::Release, testbed::Testbed};
use anyhow::{Context, Result, ensure};

use super::{
    Outcome, Ran,
    document::{DocLine, Purpose},
    machine,
    shell::Shell,
};
use crate::{helm, packages};

const SKOPEO: [(&str, &str); 1] = [("skopeo", "skopeo")];
const NO_CLUSTER: &str = "there is no cluster here: the chart is rendered";

/// Runs the commands that need no cluster. Commands that only show the result are left out.
pub fn run(lines: &[DocLine], artifacts: &Artifacts, release: &Release) -> Result<Ran> {
    let Some(helm) = helm::prepare(artifacts) else {
        return Ok((Outcome::NotRun("this machine can have no helm".into()), Vec::new()));
    };
    packages::install(&SKOPEO)?;
    let world = machine::start(artifacts, release, machine::Engine::Containerd)?;
    let mut shell = Shell::new(&world, &[&helm])?;
    let pushed = world.dir().join("registry");
    let steps: Vec<_> = lines.iter().filter(|line| line.purpose == Purpose::Step).collect();
    let seen = render(&world, &mut shell, &steps, &pushed)?;
    Ok((Outcome::Checked(seen), shell.substitutions().to_vec()))
}

/// Runs the commands without a registry and without a cluster. The node agents in the rendered
/// chart must use the image that was copied.
fn render(
    world: &Testbed,
    shell: &mut Shell<'_>,
    steps: &[&DocLine],
    pushed: &Path,
) -> Result<String> {
    fs::create_dir_all(pushed)?;
    shell.substitute(
        "cargo xtask package",
        "cargo xtask package --dev --out target/packages",
        "debug programs, in the folder of the clone",
    );
    let place = format!("dir:{}/", pushed.display());
    shell.substitute("docker://REGISTRY/", &place, "no registry is reached");
    shell.substitute("helm install", "helm template --kube-version 1.36.0", NO_CLUSTER);
    let mut rendered = String::new();
    for line in steps {
        rendered = shell.run(line)?;
    }
    let copied = fs::read_dir(pushed)?.next().context("no image was copied")??;
    ensure!(copied.path().join("manifest.json").is_file(), "the copy is no image");
    let image = format!("REGISTRY/{}", copied.file_name().to_string_lossy());
    let agents = rendered.split("\n---").filter(|object| object.contains("kind: DaemonSet"));
    let uses = |object: &str| {
        let images = object.lines().filter_map(|line| line.trim().split_once("image: "));
        images.map(|(_, name)| name.trim_matches('"')).any(|name| name == image)
    };
    ensure!(agents.clone().any(uses), "no agent of the chart runs {image}");
    drop(fs::remove_dir_all(world.dir().join("user")));
    Ok(format!("the chart's agents run {image}, which was built and copied"))
}
