//! Steps on a node that also has NVIDIA's Container Toolkit. The toolkit is started before, between
//! and after the steps of Affinode.

use std::{fmt, fs, path::Path, process::Command};

use affinode_e2e::{
    artifacts::Artifacts,
    containerd,
    cri::Cri,
    release::{Line, Release},
    testbed::{Testbed, TestbedConfig},
    wait::until_within,
};
use anyhow::{Context, Result, ensure};

use super::{
    steps::{CONFIG, CONTROLLER_ENDS, Course, HANDLER, pod},
    table::Column,
    toolkit::{self, Source, Toolkit},
};

/// Number of consecutive starts of the toolkit.
const STARTS: usize = 10;
/// Order of installation: whether the toolkit is installed on the node before or after Affinode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    OursFirst,
    ToolkitFirst,
}

/// A node on which the toolkit and Affinode are installed.
struct Scene<'a> {
    course: Course<'a>,
    toolkit: &'a Toolkit,
    source: Source,
    /// Number of restarts of containerd that Affinode has requested.
    restarts: usize,
}

/// Runs the steps for each combination of toolkit release, source, configuration version and order
/// of installation. Adds one cell for each combination to this containerd's column.
pub fn run(
    column: &mut Column,
    release: &Release,
    artifacts: &Artifacts,
    (toolkits, upgrade): (&[Toolkit], &Path),
    wanted: impl Fn(&str) -> bool,
) {
    for version in versions(release).iter().copied() {
        for toolkit in toolkits {
            for source in [Source::File, Source::Command] {
                for order in [Order::OursFirst, Order::ToolkitFirst] {
                    let name =
                        format!("{toolkit}, source {source}, configuration {version}, {order}");
                    if !wanted(&name) {
                        continue;
                    }
                    let recipe = TestbedConfig::default().node().config(CONFIG);
                    let recipe = recipe.artifacts(artifacts.clone()).release(release);
                    column.step(&name, || {
                        let world = recipe.world()?;
                        let tried = prepare(&world, version).and_then(|()| {
                            let course = Course::new(&world, upgrade)?;
                            let mut scene = Scene { course, toolkit, source, restarts: 0 };
                            scene.live(order)
                        });
                        tried.inspect_err(|_| world.show_logs())
                    });
                }
            }
        }
    }
}

/// Returns the versions of the configuration format that are tested with this containerd.
fn versions(release: &Release) -> &'static [u32] {
    let minor = release.version.trim_start_matches('v').split('.').nth(1);
    match release.line {
        Line::V1_6 | Line::V1_7 => &[2],
        // If the toolkit's file has version 3 and the file that containerd reads first has version
        // 2, containerd 2 loses the setting of the sandbox image. Testbeds have no other sandbox
        // image, so this combination is left out.
        Line::V2 if minor.and_then(|minor| minor.parse().ok()).unwrap_or(0) < 3 => &[3],
        Line::V2 => &[3, 4],
    }
}

/// Writes the node's containerd configuration in this version of the format.
fn prepare(world: &Testbed, version: u32) -> Result<()> {
    let file = world.containerd().config_file();
    let text = fs::read_to_string(&file)?;
    let old = text.lines().next().context("the configuration is empty")?.to_owned();
    let mut changed = text.replacen(&old, &format!("version = {version}"), 1);
    if version >= 4 {
        // From version 4 of the configuration on, the sockets are settings of plugins.
        let ttrpc = format!("{}.ttrpc", world.containerd().socket().display());
        changed = changed.replacen("[grpc]", "[plugins.\"io.containerd.server.v1.grpc\"]", 1);
        changed +=
            &format!("\n[plugins.\"io.containerd.server.v1.ttrpc\"]\naddress = \"{ttrpc}\"\n");
    }
    if changed != text {
        fs::write(&file, changed)?;
        world.restart_containerd()?;
    }
    Ok(())
}

impl Scene<'_> {
    fn live(&mut self, order: Order) -> Result<String> {
        let world = self.course.world;
        if order == Order::ToolkitFirst {
            self.toolkit.start(world, self.source, false)?;
        }
        let before = files(world)?;
        self.install(&[])?;
        let installed = std::mem::take(&mut self.restarts);
        ensure!(installed == 1, "{installed} restarts");
        self.uninstall()?;
        ensure!(files(world)? == before, "a file that only Affinode changed was not restored");
        self.install(&[])?;
        self.restarts = 0;
        self.start(1)?;
        self.course.start_pod("first")?;
        self.course.all_verify()?;
        self.start(1)?;
        let first = self.course.pods[0].id.clone();
        self.course.cli.move_out(&first)?;
        self.course.cli.wait_for_state(&first, "Offloaded")?;
        self.start(1)?;
        self.course.all_verify()?;
        let upgrade = self.course.upgrade.display().to_string();
        self.install(&["--from", &upgrade])?;
        self.start(1)?;
        self.course.start_pod("second")?;
        self.start(STARTS)?;
        self.course.all_verify()?;
        let said = self.course.installation.refused("uninstall", &[])?;
        ensure!(said.contains("2 shims run"), "expected `2 shims run` in: {said}");
        self.end_pods()?;
        let restarts = self.restarts;
        // containerd 1.6 has no CDI, so its pods need NVIDIA's program as soon as the toolkit is
        // installed. If Affinode was installed first, it then restarts containerd once.
        let allowed = usize::from(
            order == Order::OursFirst && world.containerd().release().line == Line::V1_6,
        );
        ensure!(restarts == allowed, "{restarts} restarts by Affinode");
        self.follow()?;
        self.uninstall()?;
        self.toolkit.start(world, self.source, false)?;
        self.is_gone()?;
        let cri = Cri::connect(&world.containerd().socket())?;
        let pod_id = cri.run_pod(&pod(world, "stock"), "nvidia")?;
        cri.remove_pod(&pod_id)?;
        Ok(format!(
            "served after each of {} starts of the toolkit, {restarts} restarts by Affinode; the handler followed \
             the default one; gone after `uninstall` and the next start; `nvidia` serves",
            STARTS + 4
        ))
    }

    /// Installs Affinode and counts the restarts of containerd.
    fn install(&mut self, more: &[&str]) -> Result<()> {
        let installation = &self.course.installation;
        self.restarts += installation.restarted(|| installation.done("install", more))?.1;
        self.is_served()
    }

    fn is_served(&self) -> Result<()> {
        let installation = &self.course.installation;
        let said = installation.done("status", &[])?;
        ensure!(
            said.contains("served by containerd"),
            "expected `served by containerd` in: {said}"
        );
        let said = installation.done("install", &["--dry-run", "--from", &self.from()])?;
        ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
        Ok(())
    }

    /// Returns the folder of the build from which Affinode is installed.
    fn from(&self) -> String {
        let installation = &self.course.installation;
        let new = self.course.upgrade.join("affinode");
        let same = fs::read(new).ok() == fs::read(installation.file("bin/affinode")).ok();
        let built = if same { self.course.upgrade } else { self.course.world.artifacts().root() };
        built.display().to_string()
    }

    /// Starts the toolkit several times. After each start, runs the node agent's check.
    fn start(&mut self, times: usize) -> Result<()> {
        for _ in 0..times {
            self.toolkit.start(self.course.world, self.source, false)?;
            self.look()?;
        }
        Ok(())
    }

    /// Runs the check that the node agent runs. If it fails, installs Affinode again.
    fn look(&mut self) -> Result<()> {
        if !self.course.installation.run("status", &[])?.status.success() {
            let from = self.from();
            return self.install(&["--from", &from]);
        }
        self.is_served()
    }

    /// Starts the toolkit twice with the option to set containerd's default handler, and twice
    /// without it. If a start changes the default handler, Affinode must adapt its own handler,
    /// with one restart of containerd. A start that changes nothing must cause no restart.
    fn follow(&mut self) -> Result<()> {
        let has_cdi = self.course.world.containerd().release().line != Line::V1_6;
        let runtime = toolkit::runtime(self.course.world)?.display().to_string();
        // Release 1.17 of the toolkit can set a default handler but cannot reset it.
        let drops = self.toolkit.drops_in;
        for (default, changes) in
            [(true, has_cdi), (true, false), (false, has_cdi && drops), (false, false)]
        {
            self.restarts = 0;
            self.toolkit.start(self.course.world, self.source, default)?;
            self.look()?;
            ensure!(
                self.restarts == usize::from(changes),
                "default {default}: {} restarts",
                self.restarts
            );
            let with_nvidia = self.ours()?.contains(&runtime);
            let expected = default || !has_cdi || !drops;
            ensure!(with_nvidia == expected, "default {default}: {}", self.ours()?);
        }
        Ok(())
    }

    /// Returns Affinode's handler, as containerd prints it.
    fn ours(&self) -> Result<String> {
        let dump = self.dump()?;
        let ours = dump.split("\n        [").filter(|table| {
            table
                .split(']')
                .next()
                .is_some_and(|name| name.ends_with(&format!("runtimes.{HANDLER}")))
        });
        Ok(ours.collect())
    }

    fn dump(&self) -> Result<String> {
        let containerd = self.course.world.containerd();
        let mut command = Command::new(containerd.release().bin_dir.join("containerd"));
        command.arg("--config").arg(containerd.config_file()).args(["config", "dump"]);
        containerd::run(&mut command)
    }

    fn uninstall(&mut self) -> Result<()> {
        let installation = &self.course.installation;
        let (_, restarts) = installation.restarted(|| installation.done("uninstall", &[]))?;
        ensure!(restarts == 1, "expected 1 restart of containerd, got {restarts}");
        ensure!(!installation.shim().exists(), "the shim was not removed");
        self.is_gone()
    }

    fn is_gone(&self) -> Result<()> {
        let ours = self.ours()?;
        ensure!(ours.is_empty(), "containerd still reads {ours}");
        let files = files(self.course.world)?;
        let left = files.iter().find(|(_, text)| text.contains(&format!("runtimes.{HANDLER}")));
        ensure!(left.is_none(), "a file of containerd still contains the handler: {left:?}");
        Ok(())
    }

    fn end_pods(&mut self) -> Result<()> {
        let world = self.course.world;
        let cri = Cri::connect(&world.containerd().socket())?;
        for pod in std::mem::take(&mut self.course.pods) {
            cri.remove_container(&pod.id)?;
            cri.remove_pod(&pod.pod_id)?;
        }
        until_within(CONTROLLER_ENDS, "the shims to end", || {
            Ok(world.shims()?.is_empty().then_some(()))
        })
    }
}

/// Returns containerd's configuration files with their content.
fn files(world: &Testbed) -> Result<Vec<(String, String)>> {
    let root = world.containerd().config_file();
    let folder = root.with_file_name("conf.d");
    let mut files = vec![root];
    for entry in fs::read_dir(&folder).into_iter().flatten() {
        files.push(entry?.path());
    }
    files.sort();
    let read =
        |path: std::path::PathBuf| Ok((path.display().to_string(), fs::read_to_string(path)?));
    files.into_iter().map(read).collect()
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::File => "file",
            Source::Command => "command",
        })
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Order::OursFirst => "Affinode first",
            Order::ToolkitFirst => "toolkit first",
        })
    }
}
