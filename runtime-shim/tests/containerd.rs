//! Tests that containers behave the same with Affinode's shim and with the stock shim, under a real
//! containerd and runc.
//!
//! Needs root, containerd, runc and gcc. If one is missing, the test records a skip and passes.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a panic is a test's failure, and a skipped test says so"
)]

mod control;
mod node;

use std::fs;
use std::process::Command;

use containerd_shim_protos::protobuf::Message;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use control::Controller;
use node::{BOX, Node, OURS, STOCK, eventually, kill, terminate};

const GPU: &str = "--env NVIDIA_VISIBLE_DEVICES=all";

#[test]
fn runs_as_stock_runc_does() {
    let Some(node) = Node::start() else { return };
    for args in [
        format!("{BOX} echo a b"),
        format!("{BOX} exit 7"),
        format!("{BOX} cat /etc/ld.so.preload"),
        "/nowhere".to_owned(),
    ] {
        assert_eq!(node.run(OURS, "", &args), node.run(STOCK, "", &args), "{args}");
    }
    for runtime in [STOCK, OURS] {
        // `script` gives ctr a terminal, which it requires.
        let line = format!(
            "ctr -a {} -n {} run --rm -t --runtime {runtime} --rootfs {} one {BOX} tty",
            node.path("c.sock").display(),
            node.namespace,
            node.path("rootfs").display()
        );
        let output = Command::new("script")
            .args(["-qec", &line, "/dev/null"])
            .env("PATH", node.path("bin").display().to_string() + ":/usr/bin:/bin")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.contains("tty 1"), "{runtime}: {output}");
    }
    node.assert_clean();
}

#[test]
fn a_spec_without_a_gpu_is_what_stock_runc_gets() {
    let Some(node) = Node::start() else { return };
    let spec = |runtime: &str| {
        node.detach(runtime, "", "same");
        let spec = fs::read(node.bundle("same").join("config.json")).unwrap();
        node.stop("same");
        spec
    };
    assert_eq!(spec(OURS), spec(STOCK));
    assert!(!node.path("affinode").exists(), "no controller was started");
    node.assert_clean();
}

#[test]
fn exec_signals_and_exit_codes_pass() {
    let Some(node) = Node::start() else { return };
    for runtime in [STOCK, OURS] {
        node.detach(runtime, "", "stays");
        assert_eq!(node.ok(&format!("task exec --exec-id e1 stays {BOX} echo in")), "in\n");
        let code = node.ctr(&format!("task exec --exec-id e2 stays {BOX} exit 9"));
        assert_eq!(code.status.code(), Some(9));
        assert!(node.ok("task ps stays").lines().count() >= 2);
        assert!(node.ok("task metrics stays").contains("METRIC"));
        node.ok("task pause stays");
        assert_eq!(node.status("stays").unwrap(), "PAUSED");
        node.ok("task resume stays");
        node.ok("task kill -s SIGTERM stays");
        eventually("it stops", || (node.status("stays")? == "STOPPED").then_some(()));
        // The exit code of the program for SIGTERM.
        let deleted = node.ctr("task delete stays");
        let words = String::from_utf8_lossy(&deleted.stderr).into_owned();
        assert!(words.contains("115"), "{runtime}: {words}");
        node.ok("container delete stays");
    }
    node.assert_clean();
}

#[test]
fn containers_outlive_a_restart_of_containerd() {
    let Some(mut node) = Node::start() else { return };
    node.detach(OURS, "", "stays");
    let before = (node.proxies(), node.stock_shims());
    assert_eq!((before.0.len(), before.1.len()), (1, 1));
    node.down();
    node.up();
    assert_eq!(node.status("stays").unwrap(), "RUNNING");
    assert_eq!((node.proxies(), node.stock_shims()), before);
    assert_eq!(node.ok(&format!("task exec --exec-id e stays {BOX} echo in")), "in\n");
    // containerd reconnected to the proxy, not to the stock shim behind it.
    kill(before.0[0]);
    eventually("containerd notices", || node.status("stays").is_none().then_some(()));
    node.ok("container delete stays");
    node.assert_clean();
}

#[test]
fn death_of_either_shim_is_the_death_of_both() {
    let Some(node) = Node::start() else { return };
    for victim in ["proxy", "stock shim", "proxy, asked"] {
        // Two containers of one group: one shim serves both.
        let group = "--annotation io.containerd.runc.v2.group=pair";
        node.detach(OURS, group, "first");
        node.detach(OURS, group, "second");
        let (proxies, stock) = (node.proxies(), node.stock_shims());
        assert_eq!((proxies.len(), stock.len()), (1, 1));
        let sockets = sockets(proxies[0]);
        assert!(sockets.iter().all(|path| fs::exists(path).unwrap()));
        match victim {
            "proxy" => kill(proxies[0]),
            "stock shim" => kill(stock[0]),
            _ => terminate(proxies[0]),
        }
        for id in ["first", "second"] {
            eventually(&format!("{id} is gone after the {victim}"), || {
                node.status(id).is_none().then_some(())
            });
            node.ok(&format!("container delete {id}"));
        }
        node.assert_clean();
        for path in sockets {
            assert!(!fs::exists(&path).unwrap(), "{path} is left by the {victim}");
        }
    }
}

/// Returns the two socket paths in a proxy's command line: the proxy's own and the stock shim's.
fn sockets(proxy: i32) -> Vec<String> {
    let line = fs::read(format!("/proc/{proxy}/cmdline")).unwrap();
    let line = String::from_utf8(line).unwrap();
    let found: Vec<_> = line
        .split('\0')
        .filter_map(|word| word.strip_prefix("unix://"))
        .map(str::to_owned)
        .collect();
    assert_eq!(found.len(), 2, "{line}");
    found
}

#[test]
fn a_member_leaves_its_group_alone() {
    let Some(node) = Node::start() else { return };
    let group = "--annotation io.containerd.runc.v2.group=pair";
    node.detach(OURS, group, "first");
    node.detach(OURS, group, "second");
    node.stop("second");
    assert_eq!(node.status("first").unwrap(), "RUNNING");
    node.detach(OURS, group, "second");
    assert_eq!(node.proxies().len(), 1);
    node.stop("first");
    assert_eq!(node.status("second").unwrap(), "RUNNING");
    node.stop("second");
    node.assert_clean();
}

#[test]
fn gpu_container_gets_library_and_announcement() {
    let Some(node) = Node::start() else { return };
    let mut controller = Controller::start(&node.path("affinode"));
    // The second layer hides the first one's preload list; the third has its own list.
    node.import(
        "test.local/box:1",
        &[
            &[("etc/ld.so.preload", Some("/old.so\n"))],
            &[("etc/ld.so.preload", None)],
            &[("etc/ld.so.preload", Some("/own.so\n"))],
        ],
    );
    let note = "--annotation affinode.io/priority=3 --annotation nerdctl/name=trainer";
    node.ok(&format!("run -d --runtime {OURS} {GPU} {note} test.local/box:1 gpu {BOX} stay"));
    let cat =
        |id: &str, path: &str| node.ok(&format!("task exec --exec-id {id} gpu {BOX} cat {path}"));
    assert_eq!(
        cat("e1", "/etc/ld.so.preload"),
        "/own.so\n/.affinode/lib/libaffinode_preload.so\n",
        "an exec has the same list"
    );
    assert_eq!(cat("e2", "/.affinode/lib/libaffinode_preload.so"), "not a library");
    let mounts = cat("e3", "/proc/self/mounts");
    for target in ["/.affinode/lib", "/.affinode/run", "/etc/ld.so.preload"] {
        let line = mounts.lines().find(|line| line.split(' ').nth(1) == Some(target)).unwrap();
        assert!(line.contains("nosuid") && line.contains("nodev"), "{line}");
        assert!(line.split(' ').nth(3).unwrap().split(',').any(|option| option == "ro"), "{line}");
        assert_eq!(line.contains("noexec"), target != "/.affinode/lib", "{line}");
    }
    let told = eventually("the container is announced", || controller.told("announce", "gpu"));
    assert_eq!(told.namespace, node.namespace);
    assert_eq!(told.container, "trainer");
    assert_eq!(told.annotations["affinode.io/priority"], "3");
    assert_eq!(told.bundle, node.bundle("gpu").to_str().unwrap());
    eventually("the controller's warning is logged", || {
        node.log().contains("a word of warning").then_some(())
    });

    // A new controller receives the announcement of the container again.
    controller.restart();
    eventually("announced again", || controller.told("announce", "gpu"));

    node.stop("gpu");
    eventually("withdrawn", || controller.told("withdraw", &told.key));
    eventually("the folder is gone", || {
        let left = fs::read_dir(node.path("affinode/containers")).unwrap().count();
        (left == 0).then_some(())
    });
    node.assert_clean();
}

#[test]
fn whiteouts_of_the_image_hold() {
    let Some(node) = Node::start() else { return };
    let _controller = Controller::start(&node.path("affinode"));
    node.import(
        "test.local/box:2",
        &[&[("etc/ld.so.preload", Some("/old.so\n"))], &[("etc/ld.so.preload", None)]],
    );
    let output = node.ok(&format!(
        "run --rm --runtime {OURS} {GPU} test.local/box:2 gpu {BOX} cat /etc/ld.so.preload"
    ));
    assert_eq!(output, "/.affinode/lib/libaffinode_preload.so\n");
    node.assert_clean();
}

#[test]
fn a_killed_gpu_container_is_withdrawn() {
    let Some(node) = Node::start() else { return };
    let controller = Controller::start(&node.path("affinode"));
    node.detach(OURS, GPU, "gpu");
    let told = eventually("announced", || controller.told("announce", "gpu"));
    kill(node.proxies()[0]);
    eventually("withdrawn by delete", || controller.told("withdraw", &told.key));
    eventually("gone", || node.status("gpu").is_none().then_some(()));
    node.ok("container delete gpu");
    node.assert_clean();
}

#[test]
fn without_library_or_controller_containers_run() {
    let Some(node) = Node::start() else { return };
    // A file in place of the run directory: neither the directory nor a controller can be created.
    fs::write(node.path("affinode"), "a file").unwrap();
    let args = format!("{BOX} echo fine");
    assert_eq!(node.run(OURS, GPU, &args), ("fine\n".to_owned(), Some(0)));
    fs::remove_file(node.path("affinode")).unwrap();
    fs::remove_file(node.path("lib/libaffinode_preload.so")).unwrap();
    assert_eq!(node.run(OURS, GPU, &args), ("fine\n".to_owned(), Some(0)));
    eventually("the reason is logged", || {
        let log = node.log();
        (log.contains("is missing; install Affinode")
            && log.contains("cannot create the container's folder"))
        .then_some(())
    });
    node.assert_clean();
}

#[test]
fn a_missing_stock_shim_is_named() {
    let Some(node) = Node::start() else { return };
    let shim = node.path("bin/containerd-shim-affinode-v1");
    let run = |stock: &str| {
        let output = Command::new(&shim)
            .args(["-namespace", "default", "-id", "x", "start"])
            .current_dir(node.path("bin"))
            .env("PATH", "/nowhere")
            .env("AFFINODE_STOCK_SHIM", stock)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty(), "stdout carries only the reply");
        String::from_utf8(output.stderr).unwrap()
    };
    let error = run("/nowhere/at/all");
    assert!(error.contains("AFFINODE_STOCK_SHIM is \"/nowhere/at/all\""), "{error}");
    let error = run(shim.to_str().unwrap());
    assert!(error.contains("is this shim itself"), "{error}");
    fs::remove_file(node.path("bin/containerd-shim-runc-v2")).unwrap();
    let error = run("");
    assert!(error.contains("containerd-shim-runc-v2 is not installed"), "{error}");
}

#[test]
fn a_failed_start_leaves_no_stock_shim() {
    let Some(node) = Node::start() else { return };
    let bundle = node.path("bundle");
    // A folder in place of the note makes `start` fail late, when the stock shim and the proxy
    // already run.
    fs::create_dir_all(bundle.join("affinode.json")).unwrap();
    fs::write(bundle.join("config.json"), "{}").unwrap();
    // The test opens the pipe for the shims' logs in place of containerd.
    let log = bundle.join("log");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &log, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let _reader = fs::File::options().read(true).write(true).open(&log).unwrap();
    let output = Command::new(node.path("bin/containerd-shim-affinode-v1"))
        .args(["-namespace", &node.namespace, "-address", "/none", "-id", "x", "start"])
        .current_dir(&bundle)
        .env("AFFINODE_STOCK_SHIM", node.path("bin/containerd-shim-runc-v2"))
        .env("AFFINODE_RUN_DIR", node.path("affinode"))
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot replace") && error.contains("affinode.json"), "{error}");
    node.assert_clean();
}

#[test]
fn gpu_container_starts_a_lasting_controller() {
    let Some(node) = Node::start() else { return };
    node.detach(OURS, "", "plain");
    node.detach(OURS, GPU, "gpu1");
    node.detach(OURS, GPU, "gpu2");
    let socket = node.path("affinode/control.sock");
    let connected = || std::os::unix::net::UnixStream::connect(&socket).ok();
    eventually("a controller runs", connected);
    let controllers = node.controllers();
    assert_eq!(controllers.len(), 1);
    let stat = fs::read_to_string(format!("/proc/{}/stat", controllers[0])).unwrap();
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let pods: Vec<_> = [node.proxies(), node.stock_shims()].concat();
    assert!(pods.iter().all(|pid| fields[1] != pid.to_string()), "no shim's child");
    assert!(pods.iter().all(|pid| fields[3] != pid.to_string()), "no shim's session");

    kill(controllers[0]);
    eventually("another one runs", || {
        let now = node.controllers();
        (now.len() == 1 && now != controllers && connected().is_some()).then_some(())
    });
    for id in ["gpu1", "gpu2", "plain"] {
        node.stop(id);
    }
    assert_eq!(node.controllers().len(), 1);
    node.assert_clean();
}

#[test]
fn info_is_the_stock_shims_under_our_name() {
    let Some(node) = Node::start() else { return };
    let info = |name: &str| {
        Command::new(node.path("bin").join(name))
            .arg("-info")
            .env("PATH", node.path("bin").display().to_string() + ":/usr/bin:/bin")
            .env_remove("AFFINODE_STOCK_SHIM")
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap()
    };
    let (stock, ours) = (info("containerd-shim-runc-v2"), info("containerd-shim-affinode-v1"));
    // containerd 1.x has no -info.
    assert_eq!(stock.status.success(), ours.status.success());
    if !stock.status.success() {
        let error = String::from_utf8(ours.stderr).unwrap();
        assert!(error.contains("flag provided but not defined: -info"), "{error}");
        return;
    }
    let mut wanted = RuntimeInfo::parse_from_bytes(&stock.stdout).unwrap();
    wanted.name = OURS.to_owned();
    assert_eq!(RuntimeInfo::parse_from_bytes(&ours.stdout).unwrap(), wanted);
}
