//! Tests of `affinode install` next to NVIDIA's container toolkit, which rewrites containerd's
//! files whenever it starts. The tests write the same files themselves, in the form that `cargo
//! xtask matrix` observes. Keys are sorted, comments are removed, and the section of CRI is copied
//! into a file that containerd imports.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::{
    containerd,
    cri::{self, Cri},
    installed::Installation,
    release::Line,
    testbed::{Testbed, TestbedConfig},
};
use anyhow::{Context, Result, ensure};
use toml::{Table, Value};

use crate::matrix::{self, on_every_containerd};

on_every_containerd!(
    TestbedConfig::default().node();
    toolkit_keeps_the_handler_served,
    uninstall_reaches_the_toolkits_copy,
    handler_follows_the_default_one,
);

const HANDLER: &str = "affinode";
const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// Source of the configuration that NVIDIA's toolkit copies into its own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// containerd's main file alone, as with `nvidia-ctk runtime configure`.
    File,
    /// The configuration that containerd merges from all its files, as with GPU Operator.
    Command,
}

/// A node on which NVIDIA's toolkit is installed.
struct Node<'a> {
    world: &'a Testbed,
    place: Installation<'a>,
    original: String,
    runtime: PathBuf,
}

impl<'a> Node<'a> {
    fn new(world: &'a Testbed) -> Result<Self> {
        let place = Installation::new(world, &world.prefix(), HANDLER)?;
        let original = fs::read_to_string(place.config())?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let runc = std::env::split_paths(&path)
            .chain(["/usr/sbin".into()])
            .map(|folder| folder.join("runc"))
            .find(|runc| runc.exists());
        let runtime = world.dir().join("tools/nvidia-container-runtime");
        symlink(runc.context("no runc")?, &runtime)?;
        Ok(Self { world, place, original, runtime })
    }

    fn drop_in(&self) -> PathBuf {
        self.place.config().with_file_name("conf.d").join("99-nvidia.toml")
    }

    /// Restores containerd's files as they were before the installations of Affinode and the
    /// toolkit.
    fn reset(&self) -> Result<()> {
        let _ = fs::remove_file(self.drop_in());
        fs::write(self.place.config(), &self.original)?;
        self.world.restart_containerd()
    }

    /// Returns the configuration that containerd would read now.
    fn dump(&self) -> Result<Table> {
        let program = self.world.containerd().release().bin_dir.join("containerd");
        let mut command = Command::new(program);
        command.arg("--config").arg(self.place.config()).args(["config", "dump"]);
        Ok(containerd::run(&mut command)?.parse()?)
    }

    /// Returns the runtime handlers of a containerd configuration.
    fn handlers(config: &Table) -> Result<&Table> {
        let of =
            |plugin: &&str| config.get("plugins")?.get(*plugin)?.get("containerd")?.get("runtimes");
        let found = PLUGINS.iter().find_map(of).and_then(Value::as_table);
        found.context("the configuration has no handlers")
    }

    /// Simulates a start of NVIDIA's toolkit, which writes its files and restarts containerd.
    fn toolkit(&self, source: Source, default: bool) -> Result<()> {
        let file = self.place.config();
        let mut root: Table = fs::read_to_string(&file)?.parse()?;
        let all = if source == Source::File { root.clone() } else { self.dump()? };
        let plugin = if all["version"].as_integer() > Some(2) { PLUGINS[1] } else { PLUGINS[0] };
        let mut cri = all["plugins"][plugin]
            .as_table()
            .context("the configuration has no CRI plugin")?
            .clone();
        cri.insert("enable_cdi".into(), true.into());
        let empty = || Value::Table(Table::new());
        let section = cri
            .entry("containerd")
            .or_insert_with(empty)
            .as_table_mut()
            .context("the configuration has another value where a table is expected")?;
        match default {
            true => drop(section.insert("default_runtime_name".into(), "nvidia".into())),
            false
                if section
                    .get("default_runtime_name")
                    .is_some_and(|n| n.as_str() == Some("nvidia")) =>
            {
                section.remove("default_runtime_name");
            }
            false => {}
        }
        let handlers = section
            .entry("runtimes")
            .or_insert_with(empty)
            .as_table_mut()
            .context("the configuration has another value where a table is expected")?;
        let runc =
            Value::Table(Table::from_iter([("runtime_type".into(), containerd::STOCK.into())]));
        let mut nvidia = handlers.get("runc").unwrap_or(&runc).clone();
        let options = nvidia
            .as_table_mut()
            .context("the configuration has another value where a table is expected")?
            .entry("options")
            .or_insert_with(empty);
        let name = self.runtime.display().to_string();
        options
            .as_table_mut()
            .context("the configuration has another value where a table is expected")?
            .insert("BinaryName".into(), name.into());
        handlers.insert("nvidia".into(), nvidia);
        let mut own = Table::new();
        own.insert("version".into(), all["version"].clone());
        own.insert(
            "plugins".into(),
            Table::from_iter([(plugin.to_owned(), Value::Table(cri))]).into(),
        );
        let import = self.drop_in().with_file_name("*.toml").display().to_string();
        root.insert("imports".into(), vec![import].into());
        fs::create_dir_all(self.drop_in().parent().unwrap_or(Path::new("/")))?;
        fs::write(self.drop_in(), own.to_string())?;
        fs::write(file, root.to_string())?;
        self.world.restart_containerd()
    }

    /// Checks the installation and repairs it, as the node agent does regularly. Returns the number
    /// of containerd's restarts.
    fn look(&self) -> Result<usize> {
        if self.place.run("status", &[])?.status.success() {
            return Ok(0);
        }
        let (_, restarts) = self.place.restarted(|| self.place.done("install", &[]))?;
        self.is_served()?;
        Ok(restarts)
    }

    fn is_served(&self) -> Result<()> {
        let said = self.place.done("status", &[])?;
        ensure!(
            said.contains("served by containerd") && !said.contains("since"),
            "expected `served by containerd` and not `since` in: {said}"
        );
        let said = self.place.done("install", &[])?;
        ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
        Ok(())
    }

    fn pod(&self, handler: &str) -> Result<()> {
        let cri = Cri::connect(&self.world.containerd().socket())?;
        let pod = cri::pod(handler, &self.world.cgroup_parent(), self.world.dir());
        let id = cri.run_pod(&pod, handler)?;
        cri.remove_pod(&id)
    }

    fn uninstall(&self) -> Result<()> {
        let (_, restarts) = self.place.restarted(|| self.place.done("uninstall", &[]))?;
        ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
        ensure!(
            !Self::handlers(&self.dump()?)?.contains_key(HANDLER),
            "the handler was not removed"
        );
        for file in [self.place.config(), self.drop_in()] {
            let text = fs::read_to_string(&file)?;
            ensure!(!text.contains(&format!("runtimes.{HANDLER}")), "{}: {text}", file.display());
        }
        Ok(())
    }

    fn each(&self, case: impl Fn(&Node<'_>, Source) -> Result<()>) -> Result<()> {
        for source in [Source::File, Source::Command] {
            case(self, source).with_context(|| format!("source {source:?}"))?;
            self.reset()?;
        }
        Ok(())
    }
}

/// Installs Affinode and NVIDIA's toolkit in both orders, and starts the toolkit several times.
/// containerd must serve Affinode's handler at all times.
fn toolkit_keeps_the_handler_served(world: &Testbed) -> Result<()> {
    let node = Node::new(world)?;
    node.each(|node, source| {
        node.place.restarted(|| node.place.done("install", &[]))?;
        node.is_served()?;
        // containerd 1.6 does not support CDI. After the toolkit's installation, pods of this
        // containerd therefore need NVIDIA's runtime program.
        let follows = usize::from(world.containerd().release().line == Line::V1_6);
        for expected in [follows, 0, 0] {
            node.toolkit(source, false)?;
            let restarts = node.look()?;
            ensure!(restarts == expected, "{restarts} restarts");
            node.is_served()?;
        }
        node.pod(HANDLER)?;
        node.pod("nvidia")?;
        node.uninstall()?;
        node.pod("nvidia")
    })?;
    node.each(|node, source| {
        node.toolkit(source, false)?;
        let before = (fs::read(node.place.config())?, fs::read(node.drop_in())?);
        node.place.restarted(|| node.place.done("install", &[]))?;
        node.place.restarted(|| node.place.done("uninstall", &[]))?;
        let after = (fs::read(node.place.config())?, fs::read(node.drop_in())?);
        ensure!(
            before == after,
            "the uninstallation did not restore a file that the toolkit did not change"
        );
        node.place.restarted(|| node.place.done("install", &[]))?;
        for _ in 0..3 {
            node.toolkit(source, false)?;
            ensure!(node.look()? == 0, "restarted");
        }
        node.pod(HANDLER)?;
        node.uninstall()
    })
}

/// Checks that an uninstallation also removes the handler from the toolkit's file. Otherwise the
/// toolkit would copy the handler again at its next start.
fn uninstall_reaches_the_toolkits_copy(world: &Testbed) -> Result<()> {
    let node = Node::new(world)?;
    node.each(|node, source| {
        node.place.restarted(|| node.place.done("install", &[]))?;
        node.toolkit(source, false)?;
        ensure!(Node::handlers(&node.dump()?)?.contains_key(HANDLER));
        node.uninstall()?;
        node.toolkit(source, false)?;
        ensure!(
            !Node::handlers(&node.dump()?)?.contains_key(HANDLER),
            "the toolkit has copied the handler again"
        );
        node.pod("nvidia")
    })
}

/// Checks that Affinode's handler is a copy of the default handler, also after the default handler
/// has changed.
fn handler_follows_the_default_one(world: &Testbed) -> Result<()> {
    let node = Node::new(world)?;
    let program = |node: &Node<'_>| -> Result<String> {
        let dump = node.dump()?;
        let options = Node::handlers(&dump)?[HANDLER].get("options").cloned();
        let name = options.as_ref().and_then(|options| options.get("BinaryName")?.as_str());
        Ok(name.unwrap_or_default().to_owned())
    };
    let has_cdi = world.containerd().release().line != Line::V1_6;
    node.each(|node, source| {
        node.place.restarted(|| node.place.done("install", &[]))?;
        ensure!(program(node)?.is_empty());
        node.toolkit(source, true)?;
        if has_cdi {
            let said = String::from_utf8(node.place.run("status", &[])?.stdout)?;
            ensure!(
                said.contains("the handler's settings differ"),
                "expected `the handler's settings differ` in: {said}"
            );
        }
        // Until it is restarted, containerd serves the handler in its earlier form.
        node.place.done("install", &["--restart-mode", "none"])?;
        let said = String::from_utf8(node.place.run("status", &[])?.stdout)?;
        ensure!(
            said.contains("former version of the handler: restart containerd"),
            "expected `former version of the handler: restart containerd` in: {said}"
        );
        world.restart_containerd()?;
        ensure!(node.look()? == 0);
        ensure!(Path::new(&program(node)?) == node.runtime, "{}", program(node)?);
        node.pod(HANDLER)?;
        node.toolkit(source, true)?;
        ensure!(node.look()? == 0, "restarted without a change");
        if has_cdi {
            // A container that requests no GPU must not get all GPUs through an environment
            // variable.
            node.toolkit(source, false)?;
            ensure!(node.look()? == 1 && program(node)?.is_empty(), "{}", program(node)?);
        }
        node.uninstall()
    })
}

/// Installs on a node whose configuration has a handler of Affinode's name that runs another
/// program. The installation must be refused, and must not change the handler.
#[test]
fn a_foreign_handler_is_refused() -> Result<()> {
    let Some(world) = matrix::world(Line::V2, TestbedConfig::default().node())? else {
        return Ok(());
    };
    let node = Node::new(&world)?;
    let text = format!(
        "version = 3\n[plugins.'{}'.containerd.runtimes.{HANDLER}]\nruntime_type = '{}'\n",
        PLUGINS[1],
        containerd::STOCK
    );
    fs::write(node.drop_in(), &text)?;
    let said = node.place.refused("install", &[])?;
    ensure!(said.contains("runs another program"), "expected `runs another program` in: {said}");
    ensure!(fs::read_to_string(node.drop_in())? == text);
    ensure!(!node.place.shim().exists(), "a file was not removed");
    Ok(())
}
