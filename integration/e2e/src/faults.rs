//! Causes faults during an installation of Affinode. After each fault, either the node must be
//! unchanged or Affinode must be installed correctly. containerd must reply, and the error must
//! contain the remedy.

mod killed;

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use crate::{cri::Cri, installed::Installation, snapshot::Snapshot, testbed::Testbed};

/// Function that causes a fault on a node without an installation. It returns a description of the
/// result.
pub type Fault = fn(&Testbed) -> Result<String>;

/// All faults, each with its name and function.
pub const ALL: [(&str, Fault); 6] = [
    ("containerd fails to restart", restart_fails),
    ("full disk", full_disk),
    ("read-only /etc", read_only),
    ("broken import", broken_import),
    ("a second installer", second_installer),
    ("kill -9 at every step", killed_at_every_step),
];

const HANDLER: &str = "affinode";

/// State of the node before the fault. It is compared with the state after the fault.
struct Scene<'a> {
    world: &'a Testbed,
    installation: Installation<'a>,
    before: Snapshot,
}

impl<'a> Scene<'a> {
    fn new(world: &'a Testbed) -> Result<Self> {
        let installation = Installation::new(world, &world.prefix(), HANDLER)?;
        Ok(Self { world, installation, before: Snapshot::of(world.dir())? })
    }

    /// Name of containerd's configuration file to which the installer adds the handler.
    fn file_name(&self) -> String {
        let file = self.installation.handler_file();
        file.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Requires that the node's files are unchanged, and that containerd replies.
    fn is_as_before(&self) -> Result<()> {
        self.before.same_as(&Snapshot::of(self.world.dir())?)?;
        Cri::connect(&self.world.containerd().socket()).map(|_| ())
    }

    /// Runs an installation in a new mount namespace, after the shell commands `mounts`. Requires
    /// that the installation fails with exit status 1 and one line of error text, and that no file
    /// is in the folder `looked_at` afterwards. Returns the error text.
    fn with_mounts(&self, mounts: &str, looked_at: &str, more: &[&str]) -> Result<String> {
        let own = self.installation.command("install", more)?;
        let script = format!(
            "set -e; mount --make-rprivate /; {mounts}; set +e; \"$@\"; code=$?; \
             find {looked_at} -mindepth 1 >&2; exit $code"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh"]);
        command.arg(own.get_program()).args(own.get_args());
        for (name, value) in own.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ensure!(
            output.status.code() == Some(1),
            "expected exit status 1, got {:?}: {said}",
            output.status
        );
        ensure!(said.lines().count() == 1, "expected one line of output, got: {said}");
        Ok(said)
    }
}

/// Requires that the output `said` contains each of the texts in `of`.
fn tells(said: &str, of: &[&str]) -> Result<()> {
    of.iter().try_for_each(|word| {
        ensure!(said.contains(word), "expected {word:?} in: {said}");
        Ok(())
    })
}

/// containerd fails to start with the new configuration. The installer must restore the old
/// configuration.
fn restart_fails(world: &Testbed) -> Result<String> {
    let scene = Scene::new(world)?;
    let installation = &scene.installation;
    let restart = |asked| {
        if asked == 0 {
            world.containerd().stop(Signal::SIGTERM)?;
            return Ok(false);
        }
        world.start_containerd()?;
        Ok(true)
    };
    let (said, restarts) = installation.served(|| installation.refused("install", &[]), restart)?;
    ensure!(restarts == 2, "expected two restarts, got {restarts}");
    scene.is_as_before()?;
    tells(&said, &["systemctl restart containerd", "journalctl"])?;
    Ok(format!("put back, containerd up again: {}", said.trim()))
}

fn full_disk(world: &Testbed) -> Result<String> {
    let scene = Scene::new(world)?;
    let prefix = world.prefix();
    let place = prefix.display();
    let mounts = format!("mkdir -p {place}; mount -t tmpfs -o size=256k none {place}");
    let said = scene.with_mounts(&mounts, &place.to_string(), &["--restart-mode", "none"])?;
    tells(&said, &["No space left", "--prefix"])?;
    // The test used this empty folder as a mount point. The installer has not left it.
    fs::remove_dir(&prefix)?;
    scene.is_as_before()?;
    let state = scene.installation.state("");
    let place = state.display();
    let fill = format!("head -c 1M /dev/zero > {place}/full 2>/dev/null || :");
    let mounts = format!("mkdir -p {place}; mount -t tmpfs -o size=64k none {place}; {fill}");
    let looked_at = format!("{place} -name 'install*'");
    let also = scene.with_mounts(&mounts, &looked_at, &["--restart-mode", "none"]);
    fs::remove_dir(&state)?;
    scene.is_as_before()?;
    tells(&also?, &["No space left", "--state-dir"])?;
    full_configuration(&scene)?;
    Ok(said)
}

/// Fault: the disk has space for Affinode's files, but not for a copy of containerd's configuration
/// file. The installation must fail and name that file, and the node must be unchanged.
fn full_configuration(scene: &Scene) -> Result<()> {
    let own = [scene.world.prefix(), scene.installation.state("")];
    own.iter().try_for_each(fs::create_dir_all)?;
    let dir = scene.world.dir().display();
    // An overlay hides the socket's listener, so the socket is mounted again over the overlay.
    let socket = scene.world.containerd().socket();
    let socket = socket.display();
    let binds = own.iter().zip(["prefix", "state"]).fold(String::new(), |all, (folder, name)| {
        format!("{all} mkdir /mnt/{name}; mount --bind /mnt/{name} {};", folder.display())
    });
    let mounts = format!(
        "mount -t tmpfs none /mnt; : > /mnt/socket; mount --bind {socket} /mnt/socket; \
         mkdir /mnt/full; mount -t tmpfs -o size=64k none /mnt/full; \
         mkdir /mnt/full/upper /mnt/full/work; \
         mount -t overlay -o lowerdir={dir},upperdir=/mnt/full/upper,workdir=/mnt/full/work none {dir}; \
         mount --bind /mnt/socket {socket}; {binds} head -c 1M /dev/zero > /mnt/full/filled 2>/dev/null || :"
    );
    let looked_at = format!("{} {}", own[0].display(), own[1].display());
    let said = scene.with_mounts(&mounts, &looked_at, &["--restart-mode", "none"]);
    own.iter().try_for_each(fs::remove_dir)?;
    scene.is_as_before()?;
    tells(&said?, &["No space left", &scene.file_name()])
}

/// Fault: /etc or /usr of the node is read-only. The installation must fail with an error that
/// contains the remedy, and the node must be unchanged.
fn read_only(world: &Testbed) -> Result<String> {
    let scene = Scene::new(world)?;
    let (prefix, state) = (world.prefix(), scene.installation.state(""));
    let (dir, own) = (world.dir().display(), [prefix, state]);
    for folder in &own {
        fs::create_dir_all(folder)?;
    }
    let writable: Vec<String> =
        own.iter().map(|f| format!("mount --bind {0} {0}", f.display())).collect();
    let sealed = format!("mount --bind {dir} {dir}; {{}}mount -o remount,bind,ro {dir}");
    let mounts = sealed.replace("{}", &format!("{}; ", writable.join("; ")));
    let looked_at = format!("{} {}", own[0].display(), own[1].display());
    let said = scene.with_mounts(&mounts, &looked_at, &["--restart-mode", "none"])?;
    tells(&said, &[&scene.file_name(), "Read-only file system", "config/containerd"])?;
    own.iter().try_for_each(fs::remove_dir)?;
    scene.is_as_before()?;
    let all = sealed.replace("{}", "");
    let also = scene.with_mounts(&all, &format!("{dir}/prefix*"), &["--restart-mode", "none"]);
    scene.is_as_before()?;
    tells(&format!("{also:?}"), &["Read-only file system", "--state-dir"])?;
    Ok(said)
}

/// Fault: a change has made containerd's configuration invalid since containerd started. `install`
/// and `status` must fail, and the node must be unchanged.
fn broken_import(world: &Testbed) -> Result<String> {
    let config = world.containerd().config_file();
    let original = fs::read_to_string(&config)?;
    let broken = world.dir().join("broken.toml");
    fs::write(&broken, "[plugins\n")?;
    let mut said = String::new();
    for import in ["/nonexistent/import.toml", &broken.display().to_string()] {
        let mut lines: Vec<&str> = original.lines().filter(|l| !l.starts_with("imports")).collect();
        let line = format!("imports = [\"{import}\"]");
        lines.insert(1, &line);
        fs::write(&config, lines.join("\n"))?;
        let scene = Scene::new(world)?;
        for verb in ["install", "status"] {
            let output = scene.installation.run(verb, &[])?;
            ensure!(
                output.status.code() == Some(1),
                "{verb} with {import}: expected exit status 1, got {:?}",
                output.status
            );
        }
        said = scene.installation.refused("install", &["--restart-mode", "none"])?;
        tells(&said, &["cannot read its configuration", "nothing was changed"])?;
        scene.is_as_before()?;
    }
    fs::remove_file(&broken)?;
    fs::write(&config, original)?;
    Ok(said.trim().to_owned())
}

/// Fault: a second installation or removal starts while the first installer waits for containerd.
/// The second one must be refused, and the first installation must succeed.
fn second_installer(world: &Testbed) -> Result<String> {
    let scene = Scene::new(world)?;
    let installation = &scene.installation;
    let mut said = Vec::new();
    let restart = |_| {
        for verb in ["install", "uninstall"] {
            said.push(installation.refused(verb, &["--restart-mode", "none"])?);
        }
        world.containerd().stop(Signal::SIGTERM)?;
        world.start_containerd()?;
        Ok(true)
    };
    let (_, restarts) = installation.served(|| installation.done("install", &[]), restart)?;
    ensure!(restarts == 1, "expected one restart, got {restarts}");
    for said in &said {
        tells(said, &["another affinode install or uninstall is running"])?;
    }
    installation.done("status", &[])?;
    installation.restarted(|| installation.done("uninstall", &[]))?;
    scene.is_as_before()?;
    let said = said.first().context("no command was refused")?;
    Ok(format!("refused while the first goes on to its end: {}", said.trim()))
}

/// Fault: an installation or removal is killed before one of its steps, at each step in turn. The
/// next installation or removal must repair the node. To save time, the test installs small scripts
/// in place of the programs. The installer treats these scripts like the programs.
fn killed_at_every_step(world: &Testbed) -> Result<String> {
    let scene = Scene::new(world)?;
    let artifacts = world.artifacts();
    let from = tempfile_dir(world)?;
    for name in ["affinode", crate::installed::SHIM] {
        fs::write(from.join(name), "#!/bin/sh\n")?;
        fs::set_permissions(from.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let library = affinode_proto::paths::LIB_FILE;
    fs::copy(artifacts.lib_dir().join(library), from.join(library))?;
    let from = from.display().to_string();
    let install = ["--restart-mode", "none", "--from", from.as_str()];
    let done = |verb: &str| {
        let more = if verb == "install" { &install[..] } else { &install[..2] };
        scene.installation.done(verb, more)
    };
    let gone = || -> Result<()> {
        match scene.installation.state("install.json").exists() {
            true => done("uninstall")?,
            false => scene.installation.refused("uninstall", &install[..2])?,
        };
        scene.before.same_as(&Snapshot::of(world.dir())?)
    };
    let installed = || -> Result<()> {
        done("install")?;
        let missing = crate::installed::FILES.iter().find(|f| !scene.installation.file(f).exists());
        ensure!(missing.is_none(), "{missing:?} is missing");
        let config = fs::read_to_string(scene.installation.handler_file())?;
        ensure!(
            config.matches("# >>> affinode").count() == 1,
            "expected one block of Affinode in: {config}"
        );
        Ok(())
    };
    let mut steps = Vec::new();
    for verb in ["install", "uninstall"] {
        let mut at = 0;
        loop {
            if verb == "uninstall" {
                done("install")?;
            }
            let more = if verb == "install" { &install[..] } else { &install[..2] };
            let command = scene.installation.command(verb, more)?;
            at += 1;
            let Some(step) = killed::before_step(&command, at)? else { break };
            // After a kill at an even step, an install followed by an uninstall must repair the
            // node. After a kill at an odd step, an uninstall must.
            let healed = if at % 2 == 0 { installed().and_then(|()| gone()) } else { gone() };
            healed.with_context(|| {
                format!("no recovery after {verb} was killed before step {at}, {step}")
            })?;
        }
        gone()?;
        steps.push(format!("{} of {verb}", at - 1));
    }
    fs::remove_dir_all(&from)?;
    scene.is_as_before()?;
    Ok(format!("healed by the next install or uninstall after each of {}", steps.join(", ")))
}

fn tempfile_dir(world: &Testbed) -> Result<std::path::PathBuf> {
    // This folder is not part of the node whose files are compared.
    let folder = world.dir().join("io/small");
    fs::create_dir_all(&folder)?;
    Ok(folder)
}
