//! Tests of the preload library without a controller, or with a controller that ends. The
//! application must continue in each of them.

#![allow(clippy::unwrap_used, reason = "a panic is the failure of a test")]

mod support;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use affinode_proto::wire::message::{Action, AgentMessage, Outcome};
use affinode_proto::wire::{Hazards, Phase};
use support::controller::{BRING_BACK, CLOSE, Connection, Controller, LOCK, OFFLOAD};
use support::{Build, Client};

fn registered(controller: &Controller) -> Client {
    let path = controller.path();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", &path)]);
    assert_eq!(client.ask("cuInit"), 0);
    client
}

/// Starts a client that registers with the controller. Its `nvidia-smi` prints the content of the
/// file `free` in the folder.
fn registered_with_tool(controller: &Controller, folder: &Path, free: &str) -> Client {
    std::fs::write(folder.join("free"), free).unwrap();
    let (path, tools) = (controller.path(), support::nvidia_smi(folder));
    let environment = [("AFFINODE_SOCKET", &*path), ("PATH", &*tools)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    client
}

/// Output of the fake `nvidia-smi`: free and total MiB of the device.
const ROOM: &str = "1, 0\n";
const NO_ROOM: &str = "0, 0\n";

#[test]
fn without_a_controller_everything_runs() {
    for build in [Build::Glibc, Build::Musl] {
        for route in ["link", "dlopen", "proc1", "proc2", "next", "default"] {
            let mut client = Client::start(build, route, &[]);
            for call in ["cuInit", "cuCtxSynchronize", "cuLaunchKernel", "cuMemAlloc"] {
                assert_eq!(client.ask(call), 0, "{build:?} {route} {call}");
            }
            assert_eq!(client.ask("fork cuCtxSynchronize"), 0, "{build:?} {route}");
            client.finish();
        }
    }
}

#[test]
fn disabled_it_does_nothing() {
    for route in ["link", "dlopen", "proc2"] {
        let mut client = Client::start(Build::Glibc, route, &[("AFFINODE_DISABLE", "1")]);
        assert_eq!(client.ask("cuInit"), 0);
        assert_eq!(client.ask("cuLaunchKernel"), 0);
        assert_eq!(client.ask("count"), 2);
        let threads = client.threads();
        assert!(!threads.contains(&"affinode-agent".to_owned()), "{threads:?}");
    }
}

#[test]
fn programs_without_cuda_do_not_notice() {
    for program in ["/bin/ls", "/bin/sh"] {
        let output = std::process::Command::new(program)
            .args(["-c", "."].iter().take(usize::from(program == "/bin/sh") * 2))
            .env("LD_PRELOAD", support::library())
            .stdin(std::process::Stdio::null())
            .output()
            .unwrap();
        assert!(output.stderr.is_empty() || program == "/bin/sh", "{output:?}");
        assert_ne!(output.status.code(), Some(127), "{output:?}");
    }
}

#[test]
fn unanswered_caller_restores_its_process() {
    // The controller dies while the process is checkpointed.
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    let mut client = registered_with_tool(&controller, folder.path(), ROOM);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    drop((agent, controller));
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

/// The agent's thread must have a large stack. The stub driver's checkpoint steps need 512 KiB of
/// it. By default a thread has 128 KiB with musl, and with glibc the size that the program chooses.
#[test]
fn agent_has_a_stack_for_the_driver() {
    for build in [Build::Glibc, Build::Musl] {
        let controller = Controller::new();
        let path = controller.path();
        let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_STACK", "65536")];
        let mut client = Client::start(build, "dlopen", &environment);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        agent.done(&OFFLOAD);
        agent.done(&BRING_BACK);
        assert_eq!(client.ask("cuCtxSynchronize"), 0, "{build:?}");
        client.finish();
    }
}

/// The agent must not read the list of environment variables when it restores the process without a
/// controller. libc frees the list when the program changes its environment, even if the agent
/// reads it at that time.
#[test]
fn self_restore_does_not_read_environment() {
    for build in [Build::Glibc, Build::Musl] {
        let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
        std::fs::write(folder.path().join("free"), ROOM).unwrap();
        let (path, tools) = (controller.path(), support::nvidia_smi(folder.path()));
        let environment = [("AFFINODE_SOCKET", &*path), ("PATH", &*tools)];
        let mut client = Client::start(build, "dlopen", &environment);
        assert_eq!(client.ask("cuInit"), 0);
        let mut agent = controller.welcome();
        agent.done(&OFFLOAD);
        client.ask("environ");
        drop((agent, controller));
        assert_eq!(client.ask("cuCtxSynchronize"), 0, "{build:?}");
        client.finish();
    }
}

/// If the application ignores SIGCHLD, the kernel reaps its children. The agent must nevertheless
/// get the result of `nvidia-smi`.
#[test]
fn self_restore_works_with_sigchld_ignored() {
    const SIGCHLD: &str = "17";
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    std::fs::write(folder.path().join("free"), ROOM).unwrap();
    let (path, tools) = (controller.path(), support::nvidia_smi(folder.path()));
    let environment = [("AFFINODE_SOCKET", &*path), ("PATH", &*tools), ("CLIENT_IGNORE", SIGCHLD)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    drop((agent, controller));
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

#[test]
fn silent_controller_is_not_needed() {
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    let (mut client, agent) = called_while_away(&controller, folder.path(), ROOM);
    assert_eq!(client.answer(), 0);
    agent.ended();
    let again = controller.welcome();
    let AgentMessage::Hello { phase, .. } = again.hello else { panic!("{:?}", again.hello) };
    assert_eq!(phase, Phase::Open);
}

#[test]
fn locked_process_without_controller_unlocks() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let mut agent = controller.welcome();
    agent.done(&[CLOSE, LOCK]);
    let page = agent.page.try_clone().unwrap();
    drop((agent, controller));
    let read = || {
        let mut bytes = vec![0; affinode_proto::wire::counters::PAGE_BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&page, &mut bytes, 0).unwrap();
        affinode_proto::wire::counters::CounterSnapshot::decode(&bytes).unwrap()
    };
    while read().phase != Phase::Open {
        std::thread::yield_now();
    }
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

#[test]
fn next_controller_takes_over() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    drop(agent);
    let mut agent = controller.welcome();
    let AgentMessage::Hello { phase, generation, .. } = agent.hello else {
        panic!("{:?}", agent.hello)
    };
    assert_eq!((phase, generation), (Phase::Checkpointed, 1));
    client.send("cuCtxSynchronize");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn a_program_that_closes_all_descriptors_runs_on() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let agent = controller.welcome();
    client.ask("closefds");
    agent.ended();
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
    assert_eq!(client.ask("cuMemAlloc"), 0);
}

/// A server that uses all of its descriptors, and takes each one that becomes free, is offloaded when
/// the controller is replaced. The new controller must be able to restore it.
#[test]
fn connection_returns_without_free_descriptors() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.ask("fillfds");
    drop(agent);
    let mut agent = controller.welcome();
    client.send("cuCtxSynchronize");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn signal_ends_process_waiting_at_the_gate() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("cuCtxSynchronize");
    agent.wake();
    let pid = nix::unistd::Pid::from_raw(client.pid() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    agent.ended();
}

#[test]
fn listener_without_welcome_is_no_controller() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let path = path.to_str().unwrap();
    let mut client = Client::start(Build::Glibc, "dlopen", &[("AFFINODE_SOCKET", path)]);
    assert_eq!(client.ask("cuInit"), 0);
    assert_eq!(client.ask("threads 20 cuCtxSynchronize"), 0);
}

#[test]
fn an_old_driver_is_told_and_never_locked() {
    let controller = Controller::new();
    let path = controller.path();
    let folder = support::other_driver("old", &["-DNO_CHECKPOINT"]);
    let environment = [("AFFINODE_SOCKET", &*path), ("LD_LIBRARY_PATH", folder.to_str().unwrap())];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    assert_eq!(agent.page().hazards, Hazards::NO_CHECKPOINT_API);
    agent.done(&[CLOSE]);
    assert_eq!(agent.order(LOCK).0, Outcome::Unsupported);
    agent.done(&[Action::Open]);
    assert_eq!(client.ask("cuCtxSynchronize"), 0);
}

/// Returns a checkpointed client in which a CUDA call waits, and the agent's connection. The
/// client's `nvidia-smi` reports free VRAM from the file `free`.
fn called_while_away(controller: &Controller, folder: &Path, free: &str) -> (Client, Connection) {
    let mut client = registered_with_tool(controller, folder, free);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("cuCtxSynchronize");
    agent.wake();
    (client, agent)
}

/// Waits until the agent has run `nvidia-smi` twice, which means that the first result showed too
/// little free VRAM.
fn wait_asked_twice(folder: &Path) {
    while std::fs::read(folder.join("asked")).map_or(0, |bytes| bytes.len()) < 2 {
        std::thread::yield_now();
    }
}

#[test]
fn no_self_restore_while_vram_is_taken() {
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    let (mut client, agent) = called_while_away(&controller, folder.path(), NO_ROOM);
    wait_asked_twice(folder.path());
    assert_eq!(agent.page().phase, Phase::Checkpointed);
    std::fs::write(folder.path().join("free"), ROOM).unwrap();
    assert_eq!(client.answer(), 0);
    // The application finds no child of its own.
    assert_eq!(client.ask("wait"), -i64::from(nix::libc::ECHILD));
}

#[test]
fn process_without_proof_waits_for_controller() {
    let (controller, folder) = (Controller::new(), tempfile::tempdir().unwrap());
    let said = "No devices were found\n";
    let (mut client, mut agent) = called_while_away(&controller, folder.path(), said);
    wait_asked_twice(folder.path());
    assert_eq!(agent.page().phase, Phase::Checkpointed);
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
}

#[test]
fn denied_system_calls_are_not_needed() {
    const MEMBARRIER: &str = "324";
    const MEMFD_CREATE: &str = "319";
    const MADVISE: &str = "28";
    // Without the barrier all threads use the shared slot. Their calls must still be held.
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_DENY", MEMBARRIER)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("threads 20 cuCtxSynchronize");
    while agent.wake().1 < 20 {}
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    assert_eq!(agent.page().calls, 21);
    client.ask("start cuStubCallback");
    client.ask("inside 1");
    agent.start(CLOSE);
    while agent.page().phase != Phase::Closing {}
    client.ask("release");
    assert_eq!(agent.report().0, Outcome::Done, "a call that was made inside another call");
    // If the page cannot be created, or the kernel cannot zero state in forked children, the
    // process is not managed.
    for denied in [MEMFD_CREATE, MADVISE] {
        let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_DENY", denied)];
        let mut client = Client::start(Build::Glibc, "dlopen", &environment);
        assert_eq!(client.ask("cuInit"), 0);
        assert_eq!(client.ask("cuLaunchKernel"), 0);
        assert!(!client.threads().contains(&"affinode-agent".to_owned()));
    }
}

/// A CUDA call inside `pthread_create`, while the library starts the agent to register the process,
/// must pass. It cannot wait for the registration, because the registration waits for
/// `pthread_create`.
#[test]
fn call_while_the_agent_is_created_passes() {
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path)];
    let mut client = Client::start_program(Build::Glibc, &["creator"], &environment);
    client.send("allocate");
    let mut agent = controller.welcome();
    assert_eq!(client.answer(), 0);
    agent.done(&OFFLOAD);
    client.send("allocate");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    client.finish();
}

/// If a seccomp filter denies the system call that waits for signals, the agent must sleep in
/// another way.
#[test]
fn agent_that_cannot_wait_for_signals_sleeps() {
    const RT_SIGTIMEDWAIT: &str = "128";
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_DENY", RT_SIGTIMEDWAIT)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&OFFLOAD);
    client.send("cuCtxSynchronize");
    agent.wake();
    agent.done(&BRING_BACK);
    assert_eq!(client.answer(), 0);
    // A thread that spins never gives up its processor voluntarily.
    let sleeps = || client.thread_status("affinode-agent", "voluntary_ctxt_switches");
    let (start, end) = (sleeps(), Instant::now() + Duration::from_secs(30));
    while sleeps() < start + 3 {
        assert!(Instant::now() < end, "the agent does not sleep");
        std::thread::yield_now();
    }
}

/// The library must not call `process_vm_readv` on a waiting caller's stack before the driver has
/// locked the process. A seccomp filter that kills the process at this system call must not end a
/// process whose gate is only closed and opened.
#[test]
fn held_call_reads_no_stack_before_the_lock() {
    const PROCESS_VM_READV: &str = "310";
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_KILL", PROCESS_VM_READV)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    agent.done(&[CLOSE]);
    client.send("cuCtxSynchronize");
    agent.wake();
    agent.done(&[Action::Open]);
    assert_eq!(client.answer(), 0);
}

/// The kernel accepts the registration for the memory barrier, and then refuses the barrier itself.
/// Without a barrier the counts of calls prove nothing. So the agent must neither close the gate
/// nor report that allocations are paused.
#[test]
fn close_and_hold_without_barrier_are_busy() {
    const MEMBARRIER_EXPEDITED: &str = "324:8";
    let controller = Controller::new();
    let path = controller.path();
    let environment = [("AFFINODE_SOCKET", &*path), ("CLIENT_DENY", MEMBARRIER_EXPEDITED)];
    let mut client = Client::start(Build::Glibc, "dlopen", &environment);
    assert_eq!(client.ask("cuInit"), 0);
    let mut agent = controller.welcome();
    let hold = Action::HoldAllocations { deadline_ms: 1_000 };
    for action in [CLOSE, hold, CLOSE] {
        let (outcome, phase, _) = agent.order(action);
        assert_eq!((outcome, phase), (Outcome::Busy, Phase::Open), "{action:?}");
        agent.done(&[Action::ReleaseAllocations]);
        assert_eq!(client.ask("cuMemAlloc"), 0);
    }
}

/// If the program closes libcuda after a first call, libcuda must stay loaded, because the agent
/// calls functions at addresses in it.
#[test]
fn libcuda_stays_loaded_after_first_call() {
    let controller = Controller::new();
    let mut client = registered(&controller);
    let mut agent = controller.welcome();
    // Two threads remain, the main thread and the agent: the thread that takes the reference has
    // ended.
    while client.threads().len() != 2 {
        std::thread::yield_now();
    }
    assert_eq!(client.ask("unload"), 1);
    agent.done(&OFFLOAD);
    agent.done(&BRING_BACK);
    assert_eq!(client.ask("unload"), 1);
}
