//! Tests of whole installations and uninstallations with a simulated containerd. Its process is a
//! shell, and its configuration is a file that the shell prints.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    time::Duration,
};

use affinode_controller::error_chain;
use toml::Table;

use super::*;
use crate::doctor::containerd::{ContainerdAbsent, ContainerdProcess};

const HANDLER: &str = "affinode";
/// containerd's configuration before the installation.
const CONFIG: &str = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\nBinaryName = \"first\"\n";

/// A machine with a simulated containerd, in a folder.
struct Machine {
    root: tempfile::TempDir,
    shell: Child,
    /// Environment of containerd. Each variable ends with a zero byte.
    environment: String,
}

impl Machine {
    fn new() -> Machine {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("config.toml"), CONFIG).unwrap();
        fs::write(root.path().join("hook"), "").unwrap();
        fs::write(root.path().join("controller.toml"), "=").unwrap();
        let mut shell = Command::new("bash");
        let shell = shell.args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap();
        Machine { root, shell, environment: String::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn config(&self) -> String {
        fs::read_to_string(self.path("config.toml")).unwrap()
    }

    /// Makes containerd run a script each time before it prints its configuration. The script runs
    /// in the folder of the machine. If it calls `exit 1`, containerd refuses its configuration.
    fn hook(&self, script: &str) {
        fs::write(self.path("hook"), script).unwrap();
    }

    fn containerd(&self) -> ContainerdNode {
        let script = format!("cd '{}' && . ./hook && cat config.toml", self.root.path().display());
        let argv = ["containerd", "-c", &script].map(Into::into);
        let (socket, config) = (self.path("containerd.sock"), self.path("config.toml"));
        let (pid, environment) = (self.shell.id(), self.environment.as_bytes());
        let argv = argv.to_vec();
        ContainerdNode::simulated(ContainerdProcess::simulated(
            socket,
            pid,
            config,
            argv,
            environment,
        ))
    }

    fn options(&self) -> InstallOptions {
        InstallOptions {
            containerd: None,
            prefix: self.path("prefix"),
            state_dir: self.path("state"),
            folders: PathsFile {
                run_dir: Some(self.path("run")),
                // This file is invalid, so no host pool of this machine is found.
                config: Some(self.path("controller.toml")),
            },
            runtime_name: HANDLER.into(),
            restart: RestartRequest::None,
            docker: DockerRequest::Never,
            podman: PodmanRequest::Never,
            unit: UnitRequest::Never,
            drain: Duration::ZERO,
            dry_run: false,
        }
    }

    /// Installs Affinode with files that have this content.
    fn install(&self, content: impl AsRef<[u8]>) -> Result<Steps, InstallError> {
        let options = self.options();
        let (lock, older) = (lock(&options)?, self.record());
        let source = SourceFile::simulated(content.as_ref());
        let docker = DockerPlan::LeftOut;
        install_on(&self.containerd(), &docker, &options, &source, lock, older)
    }

    fn uninstall(&self) -> Result<Steps, InstallError> {
        self.uninstall_from(Ok(self.containerd()))
    }

    fn uninstall_from(
        &self,
        node: Result<ContainerdNode, NodeError>,
    ) -> Result<Steps, InstallError> {
        let options = self.options();
        let (lock, record) = (lock(&options)?, self.record().unwrap());
        let folders = folders::of(&options)?;
        unused(&options, &folders, options.drain)?;
        uninstall_from(node, &options, folders, lock, record)
    }

    /// Registers the runtime in the file of a dockerd that does not run. Returns the file.
    fn register_in_docker(&self) -> PathBuf {
        let file = self.path("daemon.json");
        let text = r#"{"runtimes":{"affinode":{"runtimeType":"io.containerd.affinode.v1"}}}"#;
        fs::write(&file, text).unwrap();
        let record = serde_json::json!({
            "version": 1, "socket": self.path("docker.sock"), "config_file": file,
            "runtime_name": HANDLER, "original": null, "written": text, "folders": [],
        });
        fs::write(self.path("state/docker.json"), record.to_string()).unwrap();
        file
    }

    fn record(&self) -> Option<InstallRecord> {
        InstallRecord::read(&self.path("state")).unwrap()
    }

    /// Changes the handler of the stock runtime, whose settings Affinode's handler copies. Returns
    /// containerd's configuration.
    fn change_stock_handler(&self) -> String {
        let changed = self.config().replacen("\"first\"", "\"second\"", 1);
        fs::write(self.path("config.toml"), &changed).unwrap();
        changed
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// Makes another process write a program again. The kernel executes no program that is open for
/// writing, and a child of another test may have inherited the file from this process.
fn rewrite(program: &Path) {
    let copy = "cp \"$0\" \"$0.new\" && mv \"$0.new\" \"$0\"";
    assert!(Command::new("sh").args(["-c", copy]).arg(program).status().unwrap().success());
}

/// containerd refuses a configuration in which a second handler has the changed setting.
const REFUSE_CHANGED: &str =
    "if [ \"$(grep -c second config.toml)\" -ge 2 ]; then echo refused >&2; exit 1; fi";

/// A key that the incoming release does not know, as after a downgrade. Its controller would never
/// start, so nothing may be changed.
#[test]
fn refused_configuration_changes_no_file() {
    let machine = Machine::new();
    let config = machine.path("etc/config.toml");
    let drop_in = machine.path("etc/conf.d/50-cluster.toml");
    fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
    fs::write(&drop_in, "[policy]\nnewer_key = true\n").unwrap();
    let folders = PathsFile { config: Some(config), ..machine.options().folders };
    let options = InstallOptions {
        containerd: Some(machine.path("containerd.sock")),
        folders,
        ..machine.options()
    };
    let source = SourceFile::simulated(b"one");
    let error = install(&options, &source).unwrap_err();
    assert!(matches!(error, InstallError::Config(_)), "{error}");
    let why = error_chain::chain(&error);
    assert!(why.contains("policy.newer_key") && why.contains("50-cluster.toml"), "{why}");
    assert!(!options.prefix.exists() && machine.record().is_none());
    fs::write(&drop_in, "[policy]\n").unwrap();
    // The next check fails, because no containerd runs.
    let error = install(&options, &source).unwrap_err();
    assert!(matches!(error, InstallError::Node(NodeError::Absent(_))), "{error}");
}

/// The stock handler changes, and containerd refuses the changed handler of Affinode. The handler
/// with which containerd works must stay in its file, however often the installation is tried.
#[test]
fn failed_changes_keep_the_handler() {
    let machine = Machine::new();
    machine.install("one").unwrap();
    let changed = machine.change_stock_handler();
    machine.hook(REFUSE_CHANGED);
    for attempt in 1..=3 {
        let error = machine.install("two").unwrap_err().to_string();
        assert!(error.contains("refused"), "{error}");
        assert_eq!(machine.config(), changed, "after attempt {attempt}");
    }
    let record = machine.record().unwrap();
    assert!(record.settled, "containerd has loaded the handler of the record");
    let (ours, others) = record.files().unwrap();
    assert_eq!((ours.len(), others.len()), (3, 0), "the record lists the files that are there");
    machine.hook("");
    machine.install("two").unwrap();
    let config: Table = machine.config().parse().unwrap();
    let handler = handler::handler_of(&config, HANDLER).unwrap();
    assert_eq!(handler["options"]["BinaryName"].as_str(), Some("second"));
}

/// An installer was killed after it had recorded a changed handler, and before it wrote the
/// handler. The next installer must not remove the handler that containerd has loaded.
#[test]
fn a_killed_change_keeps_the_handler() {
    let machine = Machine::new();
    machine.install("one").unwrap();
    let changed = machine.change_stock_handler();
    let (node, options) = (machine.containerd(), machine.options());
    let older = machine.record();
    let plan = plan::install(&options, older.as_ref(), &node, &node.dump().unwrap()).unwrap();
    assert!(plan.edit.is_some());
    let source = SourceFile::simulated(b"one");
    for _ in 1..=2 {
        let record = InstallRecord::of(&options.prefix, &source, machine.record(), &plan, &[]);
        record.write(&options.state_dir).unwrap();
        heal(&options, machine.record().as_ref(), &node).unwrap();
        assert_eq!(machine.config(), changed);
    }
    // The handler that was not loaded yet is removed.
    plan.edit.as_ref().unwrap().make().unwrap();
    heal(&options, machine.record().as_ref(), &node).unwrap();
    let config: Table = machine.config().parse().unwrap();
    assert!(handler::handler_of(&config, HANDLER).is_none());
}

/// containerd 1.x searches for the shim in its PATH. If it cannot find the shim there, no pod would
/// start, so the installation is refused. containerd 2 gets the path of the shim.
#[test]
fn containerd_1_needs_the_shim_in_its_path() {
    let mut machine = Machine::new();
    let old = CONFIG.replace("version = 3", "version = 2").replace("cri.v1.runtime", "grpc.v1.cri");
    for (config, path, installs) in [
        (&*old, Some("/usr/bin:/usr/local/bin"), false),
        (&old, None, true),
        (&old, Some("/usr/bin:ROOT/prefix/bin"), true),
        (&old, Some("/usr/bin:ROOT/linked"), true),
        (CONFIG, Some("/usr/bin:/usr/local/bin"), true),
    ] {
        fs::write(machine.path("config.toml"), config).unwrap();
        let root = machine.root.path().display().to_string();
        let variable = path.map(|path| format!("PATH={}\0", path.replace("ROOT", &root)));
        machine.environment = variable.unwrap_or_default();
        match machine.install("one") {
            Ok(_) => assert!(installs, "{config}{path:?}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!installs, "{config}{path:?}: {error}");
                assert!(error.contains(&format!("{root}/prefix/bin")), "{error}");
                assert!(error.contains("--prefix /usr/local"), "{error}");
                assert_eq!(machine.config(), config);
                assert!(machine.record().is_none() && !machine.path("prefix").exists());
            }
        }
        // The next round uses a folder that is linked to that of the shim.
        let linked = machine.path("linked");
        let _ = std::os::unix::fs::symlink(machine.path("prefix/bin"), linked);
    }
}

/// containerd starts a shim while its configuration without the handler is read. The script waits
/// until the process runs the shim's program.
const START_SHIM: &str = r#"
if ! grep -q affinode config.toml && [ ! -e pid ]; then
    prefix/bin/containerd-shim-affinode-v1 1000 < /dev/null > /dev/null 2>&1 &
    echo $! > pid
    until [ "$(cat /proc/$!/comm)" = containerd-shim ]; do :; done
fi
"#;

/// A container starts after the uninstallation has found no container. Its programs must stay, and
/// the uninstallation can be repeated after its end.
#[test]
fn a_late_container_keeps_the_programs() {
    let machine = Machine::new();
    let program = fs::read("/bin/sleep").unwrap();
    machine.install(&program).unwrap();
    let shim = machine.path("prefix/bin/containerd-shim-affinode-v1");
    rewrite(&shim);
    machine.hook(START_SHIM);
    let done = machine.uninstall();
    let pid = fs::read_to_string(machine.path("pid")).unwrap();
    let kept = shim.exists() && machine.record().is_some();
    assert!(Command::new("kill").args(["-9", pid.trim()]).status().unwrap().success());
    while fs::read_link(format!("/proc/{}/exe", pid.trim())).is_ok() {
        std::thread::yield_now();
    }
    assert!(matches!(done, Err(InstallError::Late(_))), "{done:?}");
    assert!(kept, "containerd needs the shim and its record");
    assert_eq!(machine.config(), CONFIG, "no further container can start");
    machine.uninstall().unwrap();
    assert!(!shim.exists() && machine.record().is_none());
}

/// The files of an upgrade are in place, and containerd then refuses the changed handler. The
/// controller of the earlier version must be replaced nevertheless.
#[test]
fn a_failed_upgrade_replaces_the_controller() {
    let machine = Machine::new();
    machine.install(fs::read("/bin/bash").unwrap()).unwrap();
    let shim = machine.path("prefix/bin/containerd-shim-affinode-v1");
    rewrite(&shim);
    // The script of the controller. The end of its input does not end it before SIGTERM does, which
    // was sent before.
    let script = "trap 'exit 7' TERM; echo; read line; exit 0";
    fs::write(machine.path("controller"), script).unwrap();
    let mut controller = Command::new(&shim);
    controller.arg("controller").current_dir(machine.root.path());
    let mut controller = controller.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    controller.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    machine.change_stock_handler();
    machine.hook(REFUSE_CHANGED);
    let done = machine.install("two");
    // The controller's input ends.
    let status = controller.wait().unwrap();
    assert!(done.unwrap_err().to_string().contains("refused"));
    assert_eq!(fs::read_to_string(&shim).unwrap(), "two");
    assert_eq!(status.code(), Some(7), "the controller was told to end");
}

/// containerd does not run, or refuses its configuration. An uninstallation cannot remove the
/// handler, so it must not remove the runtime from Docker either.
#[test]
fn docker_stays_if_containerd_cannot_be_changed() {
    let machine = Machine::new();
    machine.install("one").unwrap();
    let (file, config) = (machine.register_in_docker(), machine.config());
    let stopped = ContainerdAbsent::NoSocket(machine.path("containerd.sock"));
    let before = fs::read_to_string(&file).unwrap();
    let error = machine.uninstall_from(Err(stopped.into())).unwrap_err();
    assert!(matches!(error, InstallError::Node(NodeError::Absent(_))), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    machine.hook("echo refused >&2; exit 1");
    let error = machine.uninstall().unwrap_err();
    assert!(matches!(error, InstallError::Node(NodeError::Config(_))), "{error}");
    assert_eq!((fs::read_to_string(&file).unwrap(), machine.config()), (before, config));
    machine.hook("");
    machine.uninstall().unwrap();
    assert!(!file.exists() && machine.record().is_none());
}

/// dockerd is stopped, and another process (systemd) listens at its socket. A connection would
/// start dockerd and its containers.
#[test]
fn a_stopped_dockerd_is_not_started() {
    if crate::doctor::containerd::process_runs(&["dockerd"]) {
        affinode_test_notes::skip("no-dockerd", "dockerd runs on this machine");
        return;
    }
    let machine = Machine::new();
    machine.install("one").unwrap();
    let file = machine.register_in_docker();
    let socket = std::os::unix::net::UnixListener::bind(machine.path("docker.sock")).unwrap();
    socket.set_nonblocking(true).unwrap();
    let options = InstallOptions { docker: DockerRequest::Detected, ..machine.options() };
    let status = docker::status(&options.state_dir).unwrap().unwrap();
    assert_eq!(status.state, DockerState::NoDocker);
    let older = machine.record();
    let plan = DockerPlan::of(&options, older.as_ref()).unwrap();
    assert!(plan.steps().is_empty(), "{plan:?}");
    machine.uninstall().unwrap();
    assert!(!fs::read_to_string(&file).unwrap_or_default().contains(HANDLER));
    let connected = socket.accept().map(drop).unwrap_err();
    assert_eq!(connected.kind(), std::io::ErrorKind::WouldBlock);
}

/// Without its default handler, containerd serves no pods, and the node would not be ready.
#[test]
fn default_handler_is_not_removed() {
    let machine = Machine::new();
    machine.install("one").unwrap();
    let config = machine.config();
    let section = "[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n";
    let default = |name: &str| format!("{section}default_runtime_name = \"{name}\"\n{config}");
    // The key of the version must come first.
    let first = |text: String| format!("version = 3\n{}", text.replacen("version = 3\n", "", 1));
    let changed = first(default(HANDLER));
    fs::write(machine.path("config.toml"), &changed).unwrap();
    let error = machine.uninstall().unwrap_err().to_string();
    assert!(error.contains("default_runtime_name") && error.contains(HANDLER), "{error}");
    assert_eq!(machine.config(), changed, "nothing was changed");
    let options = InstallOptions { runtime_name: "other".into(), ..machine.options() };
    let (lock, older) = (lock(&options).unwrap(), machine.record());
    let source = SourceFile::simulated(b"one");
    let renamed =
        install_on(&machine.containerd(), &DockerPlan::LeftOut, &options, &source, lock, older);
    assert!(matches!(renamed, Err(InstallError::Node(NodeError::DefaultHandler { .. }))));
    fs::write(machine.path("config.toml"), first(default("runc"))).unwrap();
    machine.uninstall().unwrap();
    assert!(handler::handler_of(&machine.config().parse().unwrap(), HANDLER).is_none());
}

/// k0s writes containerd's file anew at each start. The installation must not edit the file, and
/// must accept the handler that an operator adds to k0s's own files.
#[test]
fn managed_file_is_not_edited() {
    let machine = Machine::new();
    let managed = format!("# k0s_managed=true\n{CONFIG}");
    fs::write(machine.path("config.toml"), &managed).unwrap();
    let error = machine.install("one").unwrap_err().to_string();
    assert!(error.contains("k0s") && error.contains("containerd.d"), "{error}");
    assert_eq!(machine.config(), managed);
    assert!(machine.record().is_none() && !machine.path("prefix").exists());
    // The operator's handler need not equal the one that the installation would write.
    let shim = machine.path("prefix/bin/containerd-shim-affinode-v1");
    let runtimes = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.affinode]";
    let by_hand = format!(
        "{managed}{runtimes}\nruntime_type = \"io.containerd.runc.v2\"\nruntime_path = \"{}\"\n",
        shim.display()
    );
    fs::write(machine.path("config.toml"), &by_hand).unwrap();
    machine.install("one").unwrap();
    assert_eq!((machine.config(), shim.exists()), (by_hand, true));
    assert!(machine.install("one").unwrap().is_empty(), "nothing is left to do");
    let record = machine.record().unwrap();
    let added = record.block.as_ref().unwrap();
    let state = status::judge(&machine.options(), &record, added, &machine.containerd(), 0);
    assert_ne!(state, HandlerState::Outdated, "another installation would not change it");
    let error = machine.uninstall().unwrap_err();
    assert!(matches!(error, InstallError::Node(NodeError::Managed { .. })), "{error}");
    assert!(shim.exists(), "containerd still has the handler");
    fs::write(machine.path("config.toml"), &managed).unwrap();
    machine.uninstall().unwrap();
    assert!(!shim.exists());
}

/// k0s writes containerd's file anew at each start, and the handler has got another name. An
/// installation does not remove the earlier one, so the status must not ask for it.
#[test]
fn former_handler_of_a_managed_file_stays() {
    let machine = Machine::new();
    machine.install("one").unwrap();
    let mut record = machine.record().unwrap();
    let mut added = serde_json::to_value(record.block.as_ref().unwrap()).unwrap();
    // containerd has started since then.
    added["written_ms"] = 1.into();
    let added: AddedBlock = serde_json::from_value(added).unwrap();
    let mut former = added.clone();
    former.runtime_name = "former".into();
    record.former.push(former);
    let judge = || status::judge(&machine.options(), &record, &added, &machine.containerd(), 0);
    assert_eq!(judge(), HandlerState::Outdated);
    let managed = format!("# k0s_managed=true\n{}", machine.config());
    fs::write(machine.path("config.toml"), managed).unwrap();
    assert_ne!(judge(), HandlerState::Outdated);
}

/// Another program writes containerd's file anew at the restart. Its content must stay, and the
/// error must not say that containerd did not start.
#[test]
fn overwritten_file_is_left_as_it_is() {
    let machine = Machine::new();
    let [theirs, ours] = ["config.toml", "drop-in.toml"].map(|name| machine.path(name));
    let mut edit = ConfigEdit::of([theirs.clone(), ours.clone()]).unwrap();
    edit.append(&theirs, "\n[x]\n");
    edit.append(&ours, "\n[y]\n");
    edit.make().unwrap();
    let gone = || NodeError::Gone { why: "no handler".into() };
    assert!(matches!(overwritten(&edit, gone()), NodeError::Gone { .. }));
    fs::write(&theirs, "# anew\n").unwrap();
    let error = overwritten(&edit, gone());
    assert!(matches!(&error, NodeError::Overwritten(path) if *path == theirs), "{error}");
    assert!(error.to_string().contains("another program wrote"), "{error}");
    edit.undo_own().unwrap();
    assert_eq!((machine.config().as_str(), ours.exists()), ("# anew\n", false));
}
