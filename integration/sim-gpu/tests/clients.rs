//! Tests of the simulated GPU with the client programs, which load the driver in different ways.

#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

mod support;

use std::process::{Command, Stdio};

use support::{MIB, Node, products, wait_for};

const WORK: &str =
    "touch;sync;streamquery;eventquery;streamsync;eventsync;verify;alloc 4;free;meminfo;exec-info";

fn runs(program: &str) {
    let node = Node::start(&[]);
    let output = node
        .command(products().clients.join(program))
        .args(["--mib", "4", "--script", WORK])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let answers: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for answer in &answers {
        assert_eq!(answer["result"], 0, "{answer}");
    }
    let verified = answers.iter().find(|answer| answer["command"] == "verify").unwrap();
    assert_eq!((&verified["ok"], &verified["touches"]), (&true.into(), &1.into()));
    node.wait_used(0, 0);
}

#[test]
fn linked() {
    runs("linked");
}

#[test]
fn dlopen_and_dlsym() {
    runs("dlopen_dlsym");
}

#[test]
fn get_proc_address_of_cuda_11() {
    runs("proc_address_v1");
}

#[test]
fn get_proc_address_of_cuda_12() {
    runs("proc_address_v2");
}

#[test]
fn names_of_the_per_thread_default_stream() {
    runs("ptds");
}

#[test]
fn fork_then_use() {
    runs("fork_then_use");
}

#[test]
fn many_threads() {
    let node = Node::start(&[]);
    let mut command = node.command(products().clients.join("threads"));
    let status =
        command.args(["--rounds", "3", "--mib", "1"]).stdout(Stdio::null()).status().unwrap();
    assert!(status.success());
}

#[test]
fn python_by_ctypes() {
    if Command::new("python3").arg("--version").output().is_err() {
        affinode_test_notes::skip("python3", "no python3 on this machine");
        return;
    }
    let node = Node::start(&[]);
    let mut command = node.command("python3");
    let script = products().clients.join("ctypes_worker.py");
    let output =
        command.arg(script).args(["--mib", "1", "--script", "touch;sync;verify"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"ok\": true"), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_driver_behaves_as_a_real_one_call_by_call() {
    let node = Node::start(&[]);
    for program in ["api_check", "memory_check"] {
        let output = node.command(products().clients.join(program)).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let wrong: Vec<&str> = text.lines().filter(|line| line.contains("\"ok\":false")).collect();
        assert!(output.status.success() && wrong.is_empty(), "{program}: {wrong:#?}");
    }
}

#[test]
fn without_a_daemon_there_is_no_device() {
    let node = Node::start(&[]);
    let mut command = node.command(products().clients.join("dlopen_dlsym"));
    let output =
        command.env("AFFINODE_SIM_SOCKET", "/nowhere").args(["--script", "sync"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("{\"command\":\"open\",\"result\":100,"), "{text}");
}

#[test]
fn visible_devices_are_obeyed() {
    let node = Node::start(&["--gpus", "2"]);
    let mut command = node.command(products().clients.join("dlopen_dlsym"));
    command.env("CUDA_VISIBLE_DEVICES", "1").args(["--mib", "4"]);
    let mut worker = support::Client::start(command);
    worker.answer("fill");
    assert_eq!(node.used_bytes(0), 0);
    assert_eq!(node.used_bytes(1), 4 * MIB + support::CONTEXT);
    worker.expect("quit", 0);
}

#[test]
fn a_period_goes_on_until_quit() {
    let node = Node::start(&[]);
    let mut worker = node.client("dlopen_dlsym", &["--mib", "1", "--period-ms", "1"]);
    let touches =
        (0..3).map(|_| worker.answer("period")["touches"].as_u64().unwrap()).max().unwrap();
    assert_eq!(touches, 3);
    worker.expect_intact();
    worker.expect("quit", 0);
    assert!(worker.end().success());
}

#[test]
fn utilisation_follows_kernel_activity() {
    let node = Node::start(&[]);
    let mut worker = node.worker(1);
    wait_for("an idle GPU", || node.snapshot()[0].busy_percent == 0);
    worker.expect("spin 3600000", 0);
    wait_for("a busy GPU", || node.snapshot()[0].busy_percent == 100);
    assert_eq!(node.snapshot()[0].processes[0].busy_percent, 100);
    worker.kill();
    wait_for("an idle GPU again", || node.snapshot()[0].busy_percent == 0);
}

#[test]
fn the_libraries_need_nothing_but_libc() {
    for (library, soname) in
        [("libcuda.so.1", "libcuda.so.1"), ("libnvidia-ml.so.1", "libnvidia-ml.so.1")]
    {
        let output = Command::new("readelf")
            .arg("-d")
            .arg(products().libraries.join(library))
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let named = |tag: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.contains(tag));
            lines
                .filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned()))
                .collect()
        };
        assert_eq!(named("(SONAME)"), [soname]);
        for needed in named("(NEEDED)") {
            assert!(
                ["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"].contains(&needed.as_str()),
                "{needed}"
            );
        }
    }
}

/// Changes single bytes of GPU memory at several positions. The client's verification by a kernel
/// and its verification on the host must both detect each change.
#[test]
fn verify_and_check_see_every_byte() {
    const BYTES: u64 = 3 * MIB;
    let node = Node::start(&[]);
    let mut worker = node.worker(1);
    worker.expect("touch", 0);
    for command in ["alloc 1", "alloc 1", "set 1 7"] {
        worker.expect(command, 0);
    }
    let looks = |worker: &mut support::Client, ok: bool| {
        for command in ["check", "verify"] {
            let answer = worker.ask(command);
            assert_eq!((&answer["ok"], &answer["bytes"]), (&ok.into(), &BYTES.into()), "{answer}");
        }
    };
    looks(&mut worker, true);
    let last = MIB - 1;
    for place in ["", " 0", " 1"] {
        for offset in [0, 700_003, last - 8, last] {
            worker.expect(&format!("poke {offset}{place}"), 0);
            looks(&mut worker, false);
            // A second run of the same command restores the byte.
            worker.expect(&format!("poke {offset}{place}"), 0);
        }
    }
    looks(&mut worker, true);
}
