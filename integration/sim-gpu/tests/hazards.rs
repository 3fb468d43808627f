//! Tests of checkpoints on the simulated GPU, both failing and successful. The results were
//! measured with a real driver.

#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

mod support;

use std::process::{Command, Stdio};

use support::{CONTEXT, MIB, Node, as_user, is_root, now_us, products, wait_for};

const SIGSEGV: i32 = 11;
const SIGKILL: i32 = 9;
const AWAY: [&str; 2] = ["lock", "checkpoint"];
const BACK: [&str; 2] = ["restore", "unlock"];

#[test]
fn cycle_frees_vram_and_restores_contents() {
    let node = Node::start(&["--context-mib", "16"]);
    let mut worker = node.worker(32);
    worker.expect("touch", 0);
    worker.expect("sync", 0);
    assert_eq!(node.used_bytes(0), 32 * MIB + CONTEXT);
    assert_eq!(node.snapshot()[0].processes[0].pid, worker.pid());
    let resident = resident_anonymous(worker.pid());

    assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
    assert_eq!(node.state(worker.pid()), 2);
    assert_eq!(node.used_bytes(0), 0);
    assert!(node.snapshot()[0].processes.is_empty(), "a checkpointed process is in no list");
    let grown = resident_anonymous(worker.pid()) - resident;
    assert!(grown >= 32 * MIB, "the process pays for its contents: {grown}");

    assert_eq!(node.checkpoint(worker.pid(), &BACK), [0, 0]);
    assert_eq!(node.state(worker.pid()), 0);
    assert_eq!(node.used_bytes(0), 32 * MIB + CONTEXT);
    worker.expect("touch", 0);
    worker.expect_intact();
}

fn resident_anonymous(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn five_calls_crash_a_checkpointed_application() {
    let node = Node::start(&[]);
    for call in ["sync", "streamsync", "streamquery", "eventquery", "eventsync"] {
        let mut worker = node.worker(2);
        assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
        worker.send(call);
        assert_eq!(worker.fatal_signal(), Some(SIGSEGV), "{call}");
        node.wait_used(0, 0);
    }
}

#[test]
fn the_crashers_program_makes_each_of_them() {
    let node = Node::start(&[]);
    for call in ["ctx-sync", "stream-sync", "stream-query", "event-query", "event-sync"] {
        let mut unharmed = node.client("crashers", &[call, "2"]);
        assert_eq!(unharmed.answer("ready")["result"], 0);
        unharmed.send("go");
        assert_eq!(unharmed.answer(call)["ok"], true);
        let mut crashed = node.client("crashers", &[call, "2"]);
        crashed.answer("ready");
        assert_eq!(node.checkpoint(crashed.pid(), &AWAY), [0, 0]);
        crashed.send("go");
        assert_eq!(crashed.fatal_signal(), Some(SIGSEGV), "{call}");
    }
}

#[test]
fn work_waits_until_restored_and_unlocked() {
    let node = Node::start(&[]);
    for call in
        ["touch", "verify", "alloc 1", "record", "streamcreate", "spin 0", "init", "managed"]
    {
        let mut worker = node.worker(2);
        assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
        worker.expect_blocked(call);
        assert_eq!(node.checkpoint(worker.pid(), &["restore"]), [0]);
        let unlocked_us = now_us();
        assert_eq!(node.checkpoint(worker.pid(), &["unlock"]), [0]);
        let answer = worker.answer(call.split(' ').next().unwrap());
        assert_eq!(answer["result"], 0, "{call}");
        assert!(
            answer["at_us"].as_u64().unwrap() > unlocked_us,
            "{call} did not wait for the unlock"
        );
        worker.expect_intact();
    }
}

#[test]
fn crashing_calls_wait_while_locked() {
    let node = Node::start(&[]);
    let mut worker = node.worker(2);
    assert_eq!(node.checkpoint(worker.pid(), &["lock"]), [0]);
    assert_eq!(node.state(worker.pid()), 1);
    worker.expect_blocked("sync");
    assert_eq!(node.checkpoint(worker.pid(), &["checkpoint", "restore", "unlock"]), [0, 0, 0]);
    assert_eq!(worker.answer("sync")["result"], 0);
}

#[test]
fn some_calls_return_while_checkpointed() {
    let node = Node::start(&[]);
    let mut worker = node.worker(2);
    assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
    worker.expect("meminfo", 304);
    // `exec-info` queries the device's name, which returns the error 304 in this state.
    worker.expect("exec-info", 304);
    worker.expect("version", 0);
    let fork = worker.ask("fork");
    assert_eq!((&fork["child_result"], &fork["child_status"]), (&3.into(), &0.into()));
    assert_eq!(node.checkpoint(worker.pid(), &BACK), [0, 0]);
    worker.expect_intact();
}

#[test]
fn a_restore_without_room_loses_the_process() {
    let node = Node::start(&["--vram-mib", "100"]);
    let mut worker = node.worker(50);
    assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
    let mut other = node.worker(60);
    assert_eq!(node.checkpoint(worker.pid(), &["restore"]), [2]);
    assert_eq!(node.state(worker.pid()), 2);
    other.kill();
    node.wait_used(0, 0);
    assert_eq!(node.checkpoint(worker.pid(), &["restore", "restore", "unlock"]), [304, 304, 401]);
    worker.expect_blocked("touch");
}

#[test]
fn an_allocation_beyond_the_capacity_is_refused() {
    let node = Node::start(&["--vram-mib", "64"]);
    let mut worker = node.worker(16);
    worker.expect("alloc 33", 2);
    worker.expect("alloc 32", 0);
    worker.expect("alloc 1", 2);
    worker.expect("free", 0);
    let memory = worker.ask("meminfo");
    assert_eq!(memory["free_bytes"], 32 * MIB);
    assert_eq!(memory["total_bytes"], 64 * MIB);
}

#[test]
fn a_lock_waits_for_kernels_as_long_as_it_may() {
    let node = Node::start(&[]);
    let mut worker = node.worker(2);
    worker.expect("spin 3600000", 0);
    assert_eq!(node.checkpoint(worker.pid(), &["lock=50"]), [600]);
    assert_eq!(node.state(worker.pid()), 0);
    // Calls that do not wait for the kernel still succeed.
    worker.expect("streamcreate", 0);
    worker.kill();

    let mut worker = node.worker(2);
    worker.expect("spin 300", 0);
    assert_eq!(node.checkpoint(worker.pid(), &["lock=60000"]), [0]);
    assert_eq!(node.checkpoint(worker.pid(), &["unlock"]), [0]);
    worker.expect("sync", 0);
}

#[test]
fn managed_memory_prevents_checkpoint_unharmed() {
    let node = Node::start(&[]);
    let mut worker = node.worker(2);
    worker.expect("managed", 0);
    assert_eq!(node.checkpoint(worker.pid(), &["lock", "checkpoint", "unlock"]), [0, 801, 0]);
    worker.expect("sync", 0);
    worker.expect_intact();
}

/// Checkpoints a process whose memory another process has opened through legacy IPC. After the
/// restore, the owner must have its own copy of the memory, as with an exported descriptor.
#[test]
fn shared_memory_is_restored_as_a_silent_copy() {
    let node = Node::start(&[]);
    let mut giver = node.client("ipc", &["--mib", "8", "--seed", "3"]);
    assert_eq!(giver.answer("fill")["result"], 0);
    let handle = giver.ask("handle 0")["handle"].as_str().unwrap().to_owned();
    let mut taker = node.client("ipc", &[]);
    taker.expect(&format!("open {handle} 8 3"), 0);
    let used = node.used_bytes(0);
    assert_eq!(node.checkpoint(giver.pid(), &["lock", "checkpoint", "restore", "unlock"]), [0; 4]);
    assert_eq!(node.used_bytes(0), used + 8 * MIB);
    giver.expect("touch", 0);
    giver.expect_intact();
    taker.expect_intact();
    // A checkpoint of the importing process must lose that process.
    assert_eq!(node.checkpoint(taker.pid(), &["lock", "checkpoint", "restore"]), [0, 0, 1]);
    giver.expect("free", 0);
    giver.kill();
    taker.kill();
    node.wait_used(0, 0);
}

#[test]
fn peer_access_makes_the_restore_fail_for_good() {
    let node = Node::start(&["--gpus", "2"]);
    let mut worker = node.worker(2);
    worker.expect("peer", 0);
    assert_eq!(
        node.checkpoint(worker.pid(), &["lock", "checkpoint", "restore", "restore"]),
        [0, 0, 1, 304]
    );
    assert_eq!(node.state(worker.pid()), 2);
}

#[test]
fn full_permutation_moves_process_to_other_gpu() {
    let node = Node::start(&["--gpus", "2"]);
    let mut worker = node.worker(8);
    assert_eq!(node.checkpoint(worker.pid(), &AWAY), [0, 0]);
    assert_eq!(
        node.checkpoint(worker.pid(), &["restore=partial", "restore=swap", "unlock"]),
        [1, 0, 0]
    );
    assert_eq!((node.used_bytes(0), node.used_bytes(1)), (0, 8 * MIB + CONTEXT));
    worker.expect("touch", 0);
    worker.expect("alloc 1", 0);
    worker.expect_intact();
    assert_eq!(node.used_bytes(1), 9 * MIB + CONTEXT);
}

#[test]
fn pids_without_cuda_and_no_pids() {
    let node = Node::start(&[]);
    assert_eq!(node.checkpoint(std::process::id(), &["lock", "state"]), [3, 3]);
    assert_eq!(node.checkpoint(i32::MAX as u32, &["lock", "state"]), [304, 304]);
}

#[test]
fn only_root_and_the_same_user_may() {
    if !is_root() {
        affinode_test_notes::skip("root", "only root can be another user");
        return;
    }
    let node = Node::start(&[]);
    let programs = products().clients.parent().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(programs, open).unwrap();
    let mut command = node.command(products().clients.join("dlopen_dlsym"));
    command.args(["--mib", "2"]);
    let mut worker = support::Client::start(as_user(command, 1000));
    assert_eq!(worker.answer("fill")["result"], 0);
    let call = |uid| {
        let mut command = node.command(products().clients.join("checkpoint"));
        command.arg(worker.pid().to_string()).args(["lock", "unlock"]);
        as_user(command, uid).stdout(Stdio::null()).status().unwrap().success()
    };
    assert!(!call(1001));
    assert!(call(1000));
    assert!(call(0));
}

#[test]
fn the_caller_may_die_the_operation_does_not() {
    let node = Node::start(&["--checkpoint-fixed-ms", "400", "--restore-fixed-ms", "400"]);
    let mut worker = node.worker(8);
    assert_eq!(node.checkpoint(worker.pid(), &["lock"]), [0]);
    for (call, wanted) in [("checkpoint", 2), ("restore", 1)] {
        let mut caller = node.command(products().clients.join("checkpoint"));
        let mut caller =
            caller.arg(worker.pid().to_string()).arg(call).stdout(Stdio::null()).spawn().unwrap();
        // The simulated driver changes the VRAM in use at the beginning of the call and then
        // sleeps. The change therefore shows that the call is in progress.
        node.wait_used(0, if call == "checkpoint" { 0 } else { 8 * MIB + CONTEXT });
        caller.kill().unwrap();
        caller.wait().unwrap();
        assert_eq!(
            node.state(worker.pid()),
            wanted,
            "the state waits for the end of the operation"
        );
    }
    assert_eq!(node.checkpoint(worker.pid(), &["unlock"]), [0]);
    worker.expect_intact();
}

#[test]
fn a_kill_leaves_nothing_behind() {
    let node = Node::start(&[]);
    for checkpointed in [true, false] {
        let mut worker = node.worker(8);
        let pid = worker.pid();
        if checkpointed {
            assert_eq!(node.checkpoint(pid, &AWAY), [0, 0]);
        }
        worker.kill();
        node.wait_used(0, 0);
        assert_eq!(node.checkpoint(pid, &["state"]), [304]);
    }
}

#[test]
fn a_forked_child_does_not_keep_the_vram() {
    let node = Node::start(&[]);
    let mut worker = node.worker(8);
    let orphan = worker.ask("orphan")["child"].as_i64().unwrap();
    worker.expect("quit", 0);
    assert!(worker.end().success());
    node.wait_used(0, 0);
    let orphan = nix::unistd::Pid::from_raw(orphan as i32);
    nix::sys::signal::kill(orphan, nix::sys::signal::SIGKILL).expect("the child is alive still");
}

#[test]
fn calls_on_oneself_work_in_a_pid_namespace() {
    if !is_root() {
        affinode_test_notes::skip("root", "only root can be another user");
        return;
    }
    let node = Node::start(&[]);
    // In its own pid namespace the worker has pid 1. A call by root from outside uses the outer
    // pid.
    let worker = products().clients.join("api_check");
    let output = node
        .command("unshare")
        .args(["--pid", "--fork", "--mount-proc"])
        .arg(worker)
        .arg("checkpoint")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn checkpoint_above_memory_limit_kills() {
    let Some(group) = MemoryGroup::create(40 * MIB) else {
        affinode_test_notes::skip("memory-cgroup", "no memory cgroup can be made here");
        return;
    };
    let node = Node::start(&["--checkpoint-extra-mib", "16"]);
    let mut small = node.worker(8);
    group.enter(small.pid());
    assert_eq!(node.checkpoint(small.pid(), &["lock", "checkpoint", "restore", "unlock"]), [0; 4]);
    small.expect_intact();
    let large = node.worker(48);
    group.enter(large.pid());
    assert_eq!(node.checkpoint(large.pid(), &AWAY), [0, 304]);
    assert_eq!(large.fatal_signal(), Some(SIGKILL));
    node.wait_used(0, 8 * MIB + CONTEXT);
}

/// A memory cgroup for this test. Its function `create` returns `None` if the test may not create
/// one.
struct MemoryGroup(std::path::PathBuf);

impl MemoryGroup {
    fn create(limit_bytes: u64) -> Option<Self> {
        let name = format!("affinode-sim-test-{}", std::process::id());
        for (root, file) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = std::path::Path::new(root).join(&name);
            if std::fs::create_dir(&group).is_err() {
                continue;
            }
            if std::fs::write(group.join(file), limit_bytes.to_string()).is_ok() {
                return Some(Self(group));
            }
            let _ = std::fs::remove_dir(&group);
        }
        None
    }

    fn enter(&self, pid: u32) {
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let group = self.0.clone();
        // The cgroup is empty after the killed processes have been reaped.
        wait_for("an empty cgroup", || {
            std::fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|p| p.is_empty())
        });
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn many_threads_survive_cycles() {
    let node = Node::start(&[]);
    let mut threads = node.client("threads", &["--threads", "8", "--mib", "1", "--rounds", "3000"]);
    // Verified checksums stay correct while the process is checkpointed repeatedly.
    assert_eq!(threads.answer("open")["result"], 0);
    for _ in 0..8 {
        assert_eq!(threads.answer("fill")["result"], 0);
    }
    for _ in 0..3 {
        // The threads call cuCtxSynchronize. Without Affinode's gate they survive a lock, but not a
        // checkpoint.
        assert_eq!(node.checkpoint(threads.pid(), &["lock=60000", "unlock"]), [0, 0]);
        assert_eq!(threads.answer("round")["ok"], true);
    }
}

#[test]
fn the_daemon_says_what_is_wrong_with_its_socket() {
    let node = Node::start(&[]);
    let second =
        Command::new(&products().daemon).arg("--socket").arg(node.socket()).output().unwrap();
    assert!(!second.status.success());
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(said.contains("already listens") && said.contains("--socket"), "{said}");
}
