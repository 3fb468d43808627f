//! Tests of `affinode install` and `uninstall` on a machine on which only Docker runs containers.

use std::fs;

use affinode_e2e::{
    artifacts::Artifacts,
    docker::Docker,
    image,
    installed::{self, Installation},
    release::{Line, Releases},
    testbed::{Testbed, TestbedConfig},
};
use anyhow::{Result, ensure};

use crate::{docker::programs, offload::MANUAL};

const RUNTIME: &str = "affinode";
/// Docker's configuration with unsorted keys and a runtime of the operator. No program would write
/// it in this form, so any rewrite of the file is noticed.
const CONFIG: &str = r#"{
   "mtu": 1400,
   "log-opts": {"max-size": "10m"},
   "runtimes": {
      "another": {"path": "runc"}
   },

   "debug": true
}"#;

struct Place<'a> {
    docker: Docker<'a>,
    installation: Installation<'a>,
    flag: String,
}

impl Place<'_> {
    fn text(&self) -> Result<String> {
        Ok(fs::read_to_string(self.docker.config_file())?)
    }

    fn install(&self) -> Result<String> {
        self.installation.done("install", &[&self.flag])
    }

    fn refused(&self, why: &str) -> Result<()> {
        let before = self.text()?;
        let said = self.installation.refused("install", &[&self.flag])?;
        ensure!(said.contains(why), "expected `{why}` in: {said}");
        ensure!(self.text()? == before, "{why}: the configuration has changed");
        ensure!(!self.docker.serves(RUNTIME)?, "{why}: the runtime is served");
        ensure!(!self.installation.file("bin/affinode").exists(), "{why}: a file was left behind");
        for record in ["install.json", "docker.json", "docker-check.json"] {
            ensure!(!self.installation.state(record).exists(), "{why}: {record} was left behind");
        }
        Ok(())
    }
}

/// Runs a test on a machine whose containerd has CRI disabled, as in Docker's packages.
fn with_place(case: impl FnOnce(&Testbed, &Place<'_>) -> Result<()>) -> Result<()> {
    in_world(TestbedConfig::default().docker().config(MANUAL), CONFIG, case)
}

fn in_world(
    recipe: TestbedConfig,
    config: &str,
    case: impl FnOnce(&Testbed, &Place<'_>) -> Result<()>,
) -> Result<()> {
    let Some(programs) = programs()? else { return Ok(()) };
    let world = recipe.world()?;
    let outcome = Docker::start(&world, programs, config).and_then(|docker| {
        let flag = format!("--docker={}", docker.socket().display());
        let installation = Installation::new(&world, &world.prefix(), RUNTIME)?;
        case(&world, &Place { docker, installation, flag })
    });
    outcome.inspect_err(|_| world.show_logs())
}

#[test]
fn docker_serves_the_installed_runtime() -> Result<()> {
    with_place(serves_and_removes)
}

/// Installs next to containerd 2, which prints settings of CRI even if CRI is disabled. Affinode
/// must be installed as a runtime of Docker nevertheless.
#[test]
fn docker_beside_containerd_2_serves_it_too() -> Result<()> {
    let releases = Releases::read(&Artifacts::find()?)?;
    let Some(release) = releases.get(Line::V2)? else {
        affinode_test_notes::skip("containerd-line", "no containerd 2.x on this machine");
        return Ok(());
    };
    let recipe = TestbedConfig::default().docker().config(MANUAL).release(release);
    in_world(recipe, CONFIG, serves_and_removes)
}

fn serves_and_removes(world: &Testbed, place: &Place<'_>) -> Result<()> {
    let said = place.installation.done("install", &[&place.flag, "--dry-run"])?;
    ensure!(
        said.contains("+ runtime affinode") && said.contains("reload dockerd"),
        "expected `+ runtime affinode` and `reload dockerd` in: {said}"
    );
    ensure!(
        place.text()? == CONFIG && !place.docker.serves(RUNTIME)?,
        "the dry run has changed the configuration"
    );

    place.install()?;
    ensure!(place.docker.serves(RUNTIME)? && place.docker.serves("another")?);
    let added = ",\n      \"affinode\": {\n         \"runtimeType\": \"io.containerd.affinode.v1\"\n      }";
    let wanted = CONFIG.replace("{\"path\": \"runc\"}", &format!("{{\"path\": \"runc\"}}{added}"));
    ensure!(place.text()? == wanted, "{}", place.text()?);
    let said = place.install()?;
    ensure!(said.contains("nothing to do"), "expected `nothing to do` in: {said}");
    let said = place.installation.done("status", &[])?;
    ensure!(
        said.contains("served by dockerd") && !said.contains("handler"),
        "expected `served by dockerd` and not `handler` in: {said}"
    );

    let mut flags = place.docker.gpu_flags()?;
    flags.push(format!("--runtime={RUNTIME}"));
    let (id, mut worker) = place.docker.worker("trainer", 64, &flags)?;
    world.cli().move_out(&id)?;
    ensure!(worker.verify()?, "the memory of the program has changed");
    // An upgrade changes neither Docker's file nor the shim of the running container.
    let build = tempfile::tempdir()?;
    installed::another_build(world.artifacts(), build.path())?;
    let from = build.path().display().to_string();
    let said = place.installation.done("install", &[&place.flag, "--from", &from])?;
    ensure!(
        said.contains("end the controller") && !said.contains("reload dockerd"),
        "expected `end the controller` and not `reload dockerd` in: {said}"
    );
    ensure!(worker.verify()?, "the memory of the program has changed");
    let said = place.installation.refused("uninstall", &[])?;
    ensure!(
        said.contains("1 shim runs,") && place.docker.serves(RUNTIME)?,
        "dockerd does not serve the runtime, or the output is wrong: {said}"
    );
    place.docker.run(&["rm", "--force", "trainer"])?;

    let said = place.installation.done("uninstall", &["--drain", "1m"])?;
    ensure!(said.contains("- runtime affinode"), "expected `- runtime affinode` in: {said}");
    ensure!(place.text()? == CONFIG, "{}", place.text()?);
    ensure!(!place.docker.serves(RUNTIME)? && place.docker.serves("another")?);
    ensure!(!world.prefix().exists() && !place.installation.state("").exists());
    let stock = ["run", "--rm", "--network=none", image::PLAIN, "echo", "fine"];
    ensure!(place.docker.run(&stock)? == "fine");
    Ok(())
}

/// Causes several failures of the installation. After each one, Docker's configuration file must be
/// unchanged, and the error must name the reason.
#[test]
fn failed_docker_install_changes_nothing() -> Result<()> {
    with_place(|_, place| {
        let file = place.docker.config_file();
        // An operator's later mistake is found only by dockerd's reload. dockerd keeps its earlier
        // configuration.
        fs::write(&file, CONFIG.replace("{\"path\": \"runc\"}", "{\"runtimeType\": \"\"}"))?;
        place.refused("did not load its new configuration")?;
        fs::write(&file, CONFIG.replace("1400", "\"wide\""))?;
        place.refused("would not start with")?;
        fs::write(&file, CONFIG.replace("true", "true,"))?;
        place.refused("would not start with")?;
        fs::write(&file, CONFIG.replace("another", RUNTIME))?;
        place.refused("already exists and is not Affinode's")?;
        fs::write(&file, CONFIG)?;
        let nowhere = place.installation.refused("install", &["--docker=/nonexistent.sock"])?;
        ensure!(
            nowhere.contains("no dockerd answers"),
            "expected `no dockerd answers` in: {nowhere}"
        );
        // Without Docker nothing can be installed, because containerd's CRI is disabled.
        let said = place.installation.refused("install", &["--no-docker"])?;
        ensure!(
            !place.installation.file("bin/affinode").exists(),
            "bin/affinode was installed nevertheless: {said}"
        );
        place.install()?;
        ensure!(place.docker.serves(RUNTIME)?);
        Ok(())
    })
}

/// Checks that an installation keeps an operator's changes to Docker's file. It must also be
/// possible to install after an earlier installer was killed before it wrote the file.
#[test]
fn docker_config_changes_of_others_are_kept() -> Result<()> {
    with_place(|_, place| {
        let file = place.docker.config_file();
        place.install()?;
        // This is the state after an installer was killed before it wrote the file.
        fs::write(&file, CONFIG)?;
        let status = place.installation.run("status", &[])?;
        let said = String::from_utf8_lossy(&status.stdout).into_owned();
        ensure!(
            status.status.code() == Some(1) && said.contains("changed since"),
            "expected exit status 1 and `changed since`: {said}"
        );
        let said = place.install()?;
        ensure!(
            said.contains("+ runtime affinode") && place.docker.serves(RUNTIME)?,
            "dockerd does not serve the runtime, or the output is wrong: {said}"
        );

        let with_default =
            place.text()?.replace("\"mtu\"", "\"default-runtime\": \"affinode\", \"mtu\"");
        fs::write(&file, &with_default)?;
        let said = place.installation.refused("uninstall", &[])?;
        ensure!(
            said.contains("default runtime") && place.text()? == with_default,
            "expected a refusal that leaves the file unchanged: {said}"
        );

        fs::write(
            &file,
            place
                .text()?
                .replace("\"default-runtime\": \"affinode\", ", "")
                .replace("1400", "1300"),
        )?;
        place.installation.done("uninstall", &[])?;
        ensure!(place.text()? == CONFIG.replace("1400", "1300"), "{}", place.text()?);
        ensure!(!place.docker.serves(RUNTIME)?);
        Ok(())
    })
}

/// Installs on a machine where containerd has CRI enabled. The installer must change both Docker's
/// and containerd's configuration, or neither of them. Before the installation, Docker's file has
/// no list of runtimes. After the uninstallation, dockerd must not have Affinode's runtime.
#[test]
fn docker_and_containerd_are_installed_together() -> Result<()> {
    const NO_RUNTIMES: &str = "{\n  \"mtu\": 1400\n}\n";
    in_world(TestbedConfig::default().node().config(MANUAL), NO_RUNTIMES, |world, place| {
        let installation = &place.installation;
        let handlers = fs::read(installation.config())?;
        installation.systemctl("echo 'the unit is masked' >&2; exit 1")?;
        place.refused("the unit is masked")?;
        ensure!(fs::read(installation.config())? == handlers);

        installation.restarted(|| place.install())?;
        ensure!(place.docker.serves(RUNTIME)?);
        let said = installation.done("status", &[])?;
        ensure!(
            said.contains("by containerd") && said.contains("served by dockerd"),
            "expected `by containerd` and `served by dockerd` in: {said}"
        );
        // dockerd is connected to the containerd that was restarted.
        let mut flags = place.docker.gpu_flags()?;
        flags.push(format!("--runtime={RUNTIME}"));
        let (id, mut worker) = place.docker.worker("trainer", 64, &flags)?;
        world.cli().move_out(&id)?;
        ensure!(worker.verify()?, "the memory of the program has changed");
        place.docker.run(&["rm", "--force", "trainer"])?;
        installation.restarted(|| installation.done("uninstall", &["--drain", "1m"]))?;
        ensure!(fs::read(installation.config())? == handlers);
        ensure!(place.text()? == NO_RUNTIMES && !place.docker.serves(RUNTIME)?);
        Ok(())
    })
}
