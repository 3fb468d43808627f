//! `affinode install` beside k3s and rke2: containerd's configuration is written anew at each of
//! its starts, so the handler goes where that is made from.

use std::{collections::BTreeMap, fs, path::Path};

use affinode_e2e::{
    cri::{self, Cri},
    installed::Installation,
    release::Line,
    world::{Recipe, World},
};
use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use crate::matrix::{self, on_every_containerd};

on_every_containerd!(
    Recipe::default().rancher(true);
    the_handler_outlives_every_new_configuration,
);

const HANDLER: &str = "test-idle";

/// As k3s and rke2 do, it writes the configuration anew.
fn restart(world: &World) -> Result<()> {
    world.containerd().stop(Signal::SIGTERM)?;
    world.start_containerd()
}

/// Newer ones import a folder; older ones, and all with containerd 1.x, have templates alone.
#[test]
fn the_handler_is_in_a_template_where_no_folder_is_imported() -> Result<()> {
    let Some(world) = matrix::world(Line::V2, Recipe::default().rancher(false))? else {
        return Ok(());
    };
    the_handler_outlives_every_new_configuration(&world)?;
    // Another's template stays what it is.
    let file = world.containerd().config_file().with_file_name("config-v3.toml.tmpl");
    fs::write(&file, "# theirs\n{{ template \"base\" . }}\n")?;
    restart(&world)?;
    the_handler_outlives_every_new_configuration(&world)
}

fn the_handler_outlives_every_new_configuration(world: &World) -> Result<()> {
    let place = Installation::new(world, &world.prefix(), HANDLER)?;
    let config = world.containerd().config_file();
    let folder = config.parent().unwrap_or(Path::new("/"));
    let before = files(folder)?;
    let said = place.done("install", &["--dry-run"])?;
    ensure!(said.contains("config-v3.toml.d/affinode.toml") || said.contains(".tmpl"), "{said}");
    ensure!(files(folder)? == before, "a dry run changed something");
    let (_, restarts) = place.restarted(|| place.done("install", &[]))?;
    ensure!(restarts == 1, "{restarts} restarts");
    let said = place.done("install", &[])?;
    ensure!(said.contains("nothing to do"), "{said}");
    // Somebody else restarts them.
    restart(world)?;
    let said = place.done("status", &[])?;
    ensure!(said.contains("served by containerd"), "{said}");
    let cri = Cri::connect(&world.containerd().socket())?;
    let pod = cri::pod("installed", &world.cgroup_parent(), world.dir());
    for handler in [HANDLER, "runc"] {
        let id = cri.run_pod(&pod, handler)?;
        cri.remove_pod(&id)?;
    }
    let (_, restarts) = place.restarted(|| place.done("uninstall", &[]))?;
    ensure!(restarts == 1, "{restarts} restarts");
    ensure!(files(folder)? == before, "its folder is not as it was: {:?}", fs::read_dir(folder)?);
    Ok(())
}

fn files(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut seen = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let content = if path.is_file() { fs::read(&path)? } else { Vec::new() };
        seen.insert(path.display().to_string(), content);
    }
    Ok(seen)
}
