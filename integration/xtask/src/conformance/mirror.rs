//! Configures containerd and CRI-O to pull all images of critest's registries from the local
//! registry.

use std::{fmt::Write, fs, path::Path};

use affinode_e2e::{containerd::run, testbed::Testbed};
use anyhow::{Context, Result};

use super::registry::ADDRESS;

const REGISTRIES: [&str; 3] = ["registry.k8s.io", "k8s.gcr.io", "gcr.io"];
/// Folder from which CRI-O reads its registries. CRI-O cannot be configured to read another folder.
const OF_CRIO: &str = "/etc/containers/registries.conf.d";

/// Writes the configuration files by which containerd pulls from the local registry.
pub fn of_containerd(dir: &Path) -> Result<()> {
    let hosts = dir.join("hosts");
    for name in REGISTRIES {
        fs::create_dir_all(hosts.join(name))?;
        let text = format!(
            "server = \"http://{ADDRESS}\"\n[host.\"http://{ADDRESS}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"
        );
        fs::write(hosts.join(name).join("hosts.toml"), text)?;
    }
    let config = format!(
        "version = 3\n[plugins.\"io.containerd.cri.v1.images\".registry]\nconfig_path = \"{}\"\n",
        hosts.display()
    );
    Ok(fs::write(dir.join("conf.d/registry.toml"), config)?)
}

/// Writes the configuration file by which CRI-O pulls from the local registry. Mounts the file's
/// folder at `OF_CRIO`, where only the testbed sees it.
pub fn of_crio(world: &Testbed) -> Result<()> {
    let folder = world.dir().join("registries");
    fs::create_dir_all(&folder)?;
    let mut text = String::new();
    for name in REGISTRIES {
        let _ = writeln!(
            text,
            "[[registry]]\nprefix = \"{name}\"\nlocation = \"{ADDRESS}\"\ninsecure = true"
        );
    }
    fs::write(folder.join("local.conf"), text)?;
    fs::create_dir_all(OF_CRIO).with_context(|| format!("cannot make {OF_CRIO}"))?;
    let mut mount = world.keeper().command(Path::new("mount"));
    run(mount.arg("--bind").arg(folder).arg(OF_CRIO)).map(|_| ())
}
