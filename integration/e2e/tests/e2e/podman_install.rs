//! Tests of `affinode install` on a machine with Podman. The command installs a program and a
//! configuration file of Podman.

use std::{fs, path::PathBuf, process::Output};

use affinode_e2e::{
    image,
    podman::{AFFINODE, Podman, PodmanPrograms},
    testbed::{Testbed, TestbedConfig},
    wait::until,
};
use anyhow::{Result, ensure};

/// An installation of Affinode in a testbed's folder.
struct Installation<'a> {
    world: &'a Testbed,
}

impl Installation<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.world.dir().join(name)
    }

    fn program(&self) -> PathBuf {
        self.path("prefix/bin/affinode-runtime")
    }

    fn file(&self) -> PathBuf {
        self.path("containers.conf.d/affinode.conf")
    }

    fn output(&self, verb: &str) -> Result<Output> {
        let mut command = self.world.keeper().command(&self.world.artifacts().bin("affinode")?);
        let name = |flag: &str, path: PathBuf| format!("--{flag}={}", path.display());
        command.arg(verb).arg(name("prefix", self.path("prefix")));
        command.arg(name("state-dir", self.path("state-affinode")));
        // The testbed's containerd has started a controller. This controller does not belong to the
        // tested installation.
        command.env("AFFINODE_RUN_DIR", self.path("other-run"));
        if verb == "install" {
            command.args(["--no-docker", "--restart-mode=none"]);
            command.arg(name("from", self.world.artifacts().root().to_owned()));
            command.arg(name("podman", self.path("containers.conf.d")));
        }
        Ok(command.output()?)
    }

    fn done(&self, verb: &str) -> Result<String> {
        let output = self.output(verb)?;
        ensure!(output.status.success(), "{verb}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    }

    fn refused(&self, verb: &str) -> Result<String> {
        let output = self.output(verb)?;
        ensure!(!output.status.success(), "{verb}: {output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }
}

fn with_installation(
    case: impl FnOnce(&Installation<'_>, &Podman<'_>) -> Result<()>,
) -> Result<()> {
    let Some(programs) = PodmanPrograms::find() else {
        affinode_test_notes::skip("podman", "no Podman: `cargo xtask deps` installs it with apt");
        return Ok(());
    };
    let world = TestbedConfig::default().world()?;
    let podman = Podman::new(&world, programs)?;
    case(&Installation { world: &world }, &podman).inspect_err(|_| world.show_logs())
}

/// Checks that Podman uses the installed runtime. An uninstallation must not remove the runtime
/// while a container needs it.
#[test]
fn podman_uses_what_is_installed() -> Result<()> {
    with_installation(|installation, podman| {
        installation.done("install")?;
        let said = installation.done("install")?;
        ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
        let text = fs::read_to_string(installation.file())?;
        ensure!(
            text.contains(&installation.program().display().to_string()),
            "the file does not name the installed program: {text}"
        );
        podman.register(&text)?;
        let [runtime, cgroup] = podman.flags(AFFINODE);
        let first = ["run", "--detach", "--network=none", "--name=sleeper", &runtime, &cgroup];
        podman.run(&[&first[..], &[image::PLAIN, "sleep", "1000"]].concat())?;
        let said = installation.done("status")?;
        ensure!(
            said.contains("1 container or command of Podman or CRI-O runs"),
            "expected `1 container or command of Podman or CRI-O runs` in: {said}"
        );
        let said = installation.refused("uninstall")?;
        ensure!(
            said.contains("1 container or command of Podman or CRI-O is running"),
            "expected `1 container or command of Podman or CRI-O is running` in: {said}"
        );
        ensure!(installation.program().exists() && installation.file().exists());
        podman.run(&["rm", "--force", "--time=0", "sleeper"])?;
        // conmon ends a moment after its container.
        until("no container to need the runtime", || {
            let said = installation.done("status")?;
            Ok(said.contains("no container uses Affinode").then_some(()))
        })?;
        let said = installation.done("uninstall")?;
        ensure!(
            said.contains(&format!("remove {}", installation.file().display())),
            "the dry run does not remove the file: {said}"
        );
        ensure!(!installation.path("prefix").exists(), "the folder of the programs is left");
        ensure!(!installation.path("containers.conf.d").exists(), "Podman's folder is left");
        Ok(())
    })
}

/// Installs on a machine where a user has written Podman's configuration file. The installation
/// must neither replace nor remove the file.
#[test]
fn podman_file_of_a_user_stays() -> Result<()> {
    with_installation(|installation, _| {
        let own = "# Mine.\n[engine]\n";
        fs::create_dir_all(installation.path("containers.conf.d"))?;
        fs::write(installation.file(), own)?;
        installation.done("install")?;
        ensure!(
            fs::read_to_string(installation.file())? == own,
            "the installation has replaced the file of the user"
        );
        ensure!(installation.program().exists(), "the program was not installed");
        installation.done("uninstall")?;
        ensure!(
            fs::read_to_string(installation.file())? == own,
            "the uninstallation has changed the file of the user"
        );
        // A file that was installed and then changed is kept, too.
        fs::remove_file(installation.file())?;
        installation.done("install")?;
        fs::write(installation.file(), own)?;
        installation.done("install")?;
        ensure!(
            fs::read_to_string(installation.file())? == own,
            "the installation has undone the change to the file"
        );
        let said = installation.done("uninstall")?;
        ensure!(
            said.contains("it was changed") && installation.file().exists(),
            "expected `it was changed`, and the file kept: {said}"
        );
        Ok(())
    })
}
