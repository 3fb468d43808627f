//! Checks two pages of the documents on the test cluster, as their readers would use them. A
//! platform engineer runs the commands of the Kubernetes page, until an idle pod is offloaded. Then
//! a user of JupyterHub starts a notebook server on the cluster.

use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::{LABEL, SMALL_MIB, pods, release, step, systemd, wait_state};
use crate::{
    k8s::{
        control_plane::{Plane, START_TIMEOUT},
        files,
    },
    output, packages,
    personas::{Persona, document::Purpose, jupyterhub, shell::Shell},
};

const SKOPEO: [(&str, &str); 1] = [("skopeo", "skopeo")];
/// Name of Affinode's image on the nodes.
const IMAGE: &str = "affinode/affinode";

/// Runs the commands of the Kubernetes page, and then a GPU pod whose manifest does not name
/// Affinode.
pub fn platform_engineer(plane: &Plane<'_>) -> Result<()> {
    step("The commands of the Kubernetes page");
    packages::install(&SKOPEO)?;
    let mut shell = Shell::new(plane.world(), &[&plane.programs().bin_dir()])?;
    shell.set("KUBECONFIG", &plane.dir().join(files::ADMIN));
    shell.set("HELM_CACHE_HOME", &plane.dir().join("helm"));
    let archive = plane.world().dir().join("pushed.tar");
    for (from, to, why) in [
        (
            "cargo xtask package",
            "cargo xtask package --dev --out target/packages".to_owned(),
            "debug programs, in the folder of the clone",
        ),
        (
            "docker://REGISTRY/affinode",
            format!("docker-archive:{}:{IMAGE}", archive.display()),
            "there is no registry: the nodes import the image from a file",
        ),
        ("REGISTRY/affinode", IMAGE.to_owned(), "the name of the image in that file"),
        ("helm install", install(plane)?, "nodes of this machine, without systemd"),
    ] {
        shell.substitute(from, &to, why);
    }
    plane.nodes().iter().try_for_each(systemd::systemctl)?;
    let lines = Persona::Kubernetes.lines()?;
    for line in lines.iter().filter(|line| line.purpose == Purpose::Step) {
        output::note(&format!("$ {}", line.text));
        shell.run(line)?;
        if archive.exists() {
            for node in plane.nodes() {
                node.world.containerd().import(node.world.keeper(), "k8s.io", &archive)?;
            }
            std::fs::remove_file(&archive)?;
        }
    }
    let deadline = Instant::now() + START_TIMEOUT;
    systemd::restart_each_once(plane, || Ok(Instant::now() > deadline))?;
    for node in plane.nodes() {
        wait_state(plane, &node.name, |state| state == "served")?;
    }
    systemd::none_asks(plane)?;
    for line in lines.iter().filter(|line| line.purpose == Purpose::Look) {
        let said = shell.run(line)?;
        output::note(&format!("$ {}", line.text));
        output::out(said.trim_end());
        let shows = match line.text.contains(LABEL) {
            true => said.lines().filter(|row| row.contains("true")).count() == plane.nodes().len(),
            false => said.contains("Succeeded"),
        };
        ensure!(shows, "{} does not show the expected result: {said}", line.text);
    }
    pods::comes_and_goes(plane, plane.first(), "of-a-user")?.delete()?;
    notebook(plane)?;
    systemd::uninstall(plane)
}

/// Starts a pod with the annotations, the runtime class and the resources of the JupyterHub profile
/// with a shared GPU. KubeSpawner creates these three parts from the repository's values. The rest
/// of the pod is a test program on the first node. The idle timeout is 2 s instead of five minutes.
fn notebook(plane: &Plane<'_>) -> Result<()> {
    const NAME: &str = "jupyter-ana";
    step("A user of JupyterHub starts a server with the profile GPU");
    let made = jupyterhub::pods_of_the_repository(plane.world().artifacts())?;
    let made = made.get("GPU").context("the values have no profile GPU")?;
    let mut pod = plane.first().gpu_pod(NAME, SMALL_MIB)?;
    pod["metadata"]["annotations"] = made["metadata"]["annotations"].clone();
    pod["metadata"]["annotations"]["affinode.io/idle-timeout"] = "2s".into();
    pod["spec"]["runtimeClassName"] = made["spec"]["runtimeClassName"].clone();
    pod["spec"]["containers"][0]["resources"] = made["spec"]["containers"][0]["resources"].clone();
    pods::gives_back(plane, plane.first(), NAME, &pod)?.delete()
}

/// Returns the `helm install` command with the values for this cluster.
fn install(plane: &Plane<'_>) -> Result<String> {
    let values = release::values_file(plane)?;
    let options = systemd::options().map(|option| format!("'{option}'")).join(" ");
    Ok(format!("helm install --values {} {options}", values.display()))
}
