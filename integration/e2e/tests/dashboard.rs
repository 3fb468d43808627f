//! Tests of the controller's HTTP API (the API of the dashboard), on a node with a real controller
//! and a simulated GPU.

use std::{
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::UnixStream,
    process::Output,
};

use affinode_e2e::{
    supervisor::Job,
    testbed::{Testbed, TestbedConfig},
    wait::until,
    worker::Worker,
};
use anyhow::{Context, Result};
use serde_json::Value;

const MANUAL: &str = r#"
[policy]
mode = "manual"
idle_timeout = "200ms"
minimum_residency = "1ms"
[timing]
sample_interval = "50ms"
"#;

/// Sends an HTTP request to the testbed's controller, over the socket in its run directory. Returns
/// the status code and the body.
fn ask(world: &Testbed, method: &str, path: &str) -> Result<(u16, String)> {
    let socket = world.cli().run_dir().join("http.sock");
    let stream = UnixStream::connect(&socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    ask_over(stream, method, path)
}

fn ask_over(mut stream: impl Read + Write, method: &str, path: &str) -> Result<(u16, String)> {
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) =
        answer.split_once("\r\n\r\n").context("the response has no end of its head")?;
    let status = head.split(' ').nth(1).context("the response has no status")?.parse()?;
    Ok((status, body.to_owned()))
}

fn node(world: &Testbed) -> Result<Value> {
    Ok(serde_json::from_str(&ask(world, "GET", "/api/v1/node")?.1)?)
}

#[test]
fn api_and_command_agree() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Idle")?;
    let key = until("the API to show what the command shows", || {
        let seen = node(&world)?;
        let container = &seen["containers"][0];
        Ok(container["key"].as_str().filter(|_| container["state"] == "Idle").map(str::to_owned))
    })?;

    let (status, said) = ask(&world, "POST", &format!("/api/v1/containers/{key}/offload"))?;
    assert_eq!(status, 200, "{said}");
    let row = world.cli().wait_for_state("worker", "Offloaded")?;
    assert!(row.offloaded_bytes > 0, "{row:?}");
    world.cli().wait_for_event("the request", |event| event.kind == "request")?;

    until("the offload to be counted", || {
        let metrics = ask(&world, "GET", "/metrics")?.1;
        Ok(metrics.contains("affinode_containers{state=\"Offloaded\"} 1").then_some(()))
    })?;
    until("the content to count as host memory", || {
        Ok((node(&world)?["host_used_bytes"].as_u64() > Some(0)).then_some(()))
    })?;
    assert!(worker.verify()?, "the memory of the program has changed");
    until("the wake to be counted", || {
        let metrics = ask(&world, "GET", "/metrics")?.1;
        Ok(metrics.contains("affinode_wake_latency_seconds_count 1").then_some(()))
    })?;
    let seen = until("the restore to be shown", || {
        let seen = node(&world)?;
        let container = &seen["containers"][0];
        let only_one = container["wake_p99_ms"] == container["last_wake_ms"];
        let resident = container["restores"] == 1 && seen["host_used_bytes"] == 0;
        Ok((only_one && resident).then_some(seen))
    })?;
    assert!(seen["host_free_bytes"].as_u64() > Some(0), "{seen}");
    hook_overhead_is_reported(&world)
}

/// Requires that the controller reports two values for a process: the measured overhead of a hook,
/// and the time that its calls waited for a restore.
fn hook_overhead_is_reported(world: &Testbed) -> Result<()> {
    let process = until("the wait at the gate to be reported", || {
        let process = node(world)?["containers"][0]["processes"][0].clone();
        Ok((process["held_us"].as_u64() > Some(0)).then_some(process))
    })?;
    let cost_ps = process["call_cost_ps"].as_u64().context("the process has no cost of a call")?;
    assert!((1..1_000_000).contains(&cost_ps), "{cost_ps} ps");
    for name in ["hook_seconds_total", "held_calls_seconds_total", "hook_call_cost_seconds"] {
        let name = format!("affinode_container_{name}{{");
        until(&name, || {
            let metrics = ask(world, "GET", "/metrics")?.1;
            let line = metrics.lines().find(|line| line.starts_with(&name));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            Ok(value.filter(|value| *value > 0.0))
        })?;
    }
    Ok(())
}

#[test]
fn the_history_outlives_the_controller() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let _worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Idle")?;
    world.cli().run(&["offload", "worker"])?;
    let returned = |world: &Testbed| -> Result<Option<f64>> {
        let Ok(text) = world.cli().run(&["report", "-o", "json"]) else { return Ok(None) };
        let report: Value = serde_json::from_str(&text)?;
        let offloads = report["rows"][0]["offloads"].as_u64().unwrap_or(0);
        Ok(report["rows"][0]["returned_gpu_seconds"].as_f64().filter(|s| *s > 0.0 && offloads == 1))
    };
    let before = until("the report to contain the offload", || returned(&world))?;
    // SIGTERM, as at an upgrade, makes the controller write all data to disk.
    let controller = world.controller()?.context("no controller is running")?;
    nix::sys::signal::kill(controller.pid, nix::sys::signal::Signal::SIGTERM)?;
    until("the next controller", || {
        Ok(world.controller()?.filter(|next| next.pid != controller.pid))
    })?;
    let after = until("the report of the next controller", || returned(&world))?;
    assert!(
        after >= before,
        "the report shows {after} freed GPU seconds after the restart, {before} before"
    );
    Ok(())
}

#[test]
fn port_in_use_disables_only_the_dashboard() -> Result<()> {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let listen = format!("[http]\nlisten = \"{}\"\n", taken.local_addr()?);
    let world = TestbedConfig::default().config(&format!("{MANUAL}{listen}")).world()?;
    let mut worker = Worker::start(&world, "worker", 64)?;
    world.cli().wait_for_state("worker", "Idle")?;
    world.cli().run(&["offload", "worker"])?;
    assert!(worker.verify()?);
    let seen: Value = serde_json::from_str(&world.cli().run(&["ps", "-o", "json"])?)?;
    assert!(seen["dashboard"].is_null(), "{seen}");
    Ok(())
}

/// Runs the command `affinode` on the host. Its environment lets it find the testbed's NVML.
fn command(world: &Testbed, arguments: &[&str]) -> Result<Output> {
    let mut command = world.host_gpu_command(&world.artifacts().bin("affinode")?);
    command.env("AFFINODE_RUN_DIR", world.cli().run_dir()).args(arguments);
    Ok(command.output()?)
}

#[test]
fn empty_node_shows_its_gpus() -> Result<()> {
    let world = TestbedConfig::default().config(MANUAL).world()?;
    let ps = command(&world, &["ps"])?;
    let (said, rest) =
        (String::from_utf8_lossy(&ps.stdout), String::from_utf8_lossy(&ps.stderr).into_owned());
    assert!(ps.status.success() && said.contains("GPU 0 "), "{said}{rest}");
    assert!(rest.contains("no GPU container") && rest.contains("no controller"), "{rest}");
    let ps = command(&world, &["ps", "-o", "json"])?;
    let seen: Value = serde_json::from_slice(&ps.stdout)?;
    assert_eq!((&seen["controller_pid"], &seen["containers"]), (&0.into(), &Value::Array(vec![])));
    assert!(seen["gpus"][0]["vram_total_bytes"].as_u64() > Some(0), "{seen}");
    assert!(world.controller()?.is_none(), "the command has started a controller");

    start_unit(&world)?;
    let listed = world.cli().ps()?;
    assert!(listed.containers.is_empty(), "{listed:?}");
    let gpu = world.cli().gpu()?;
    assert_eq!(Some(gpu.vram_total_bytes), seen["gpus"][0]["vram_total_bytes"].as_u64());
    assert_eq!(ask(&world, "GET", "/healthz")?.0, 200);
    let shown = node(&world)?;
    assert_eq!(
        (&shown["containers"], &shown["gpus"][0]["index"]),
        (&seen["containers"], &0.into())
    );
    until("the metrics of the GPU", || {
        let (status, metrics) = ask(&world, "GET", "/metrics")?;
        let total = metrics.lines().any(|line| line.starts_with("affinode_gpu_vram_total_bytes{"));
        Ok((status == 200 && total).then_some(()))
    })?;
    let ps = command(&world, &["ps"])?;
    let rest = String::from_utf8_lossy(&ps.stderr);
    assert!(ps.status.success() && !rest.contains("no controller"), "{rest}");
    Ok(())
}

/// Starts a controller with the command and the environment of its systemd unit. The start needs no
/// container.
fn start_unit(world: &Testbed) -> Result<()> {
    let shim = world.artifacts().bin("containerd-shim-affinode-v1")?;
    let path = |path: &str| world.dir().join(path).display().to_string();
    let mut env = world.gpu().host_env(world.artifacts(), world.dir());
    for (name, value) in [
        ("AFFINODE_RUN_DIR", world.cli().run_dir().display().to_string()),
        ("AFFINODE_CONFIG", path("affinode/config.toml")),
        // The variable is set because systemd sets it, but no process reads the notifications.
        ("NOTIFY_SOCKET", path("notify")),
    ] {
        env.insert(name.into(), value);
    }
    let argv = vec![shim.display().to_string(), "controller".into()];
    world.keeper().spawn(&Job { argv, env, log: world.dir().join("unit.log") })?;
    Ok(())
}

/// Checks that a TCP port without a token accepts only read requests, because every user of the
/// machine can connect to it.
#[test]
fn port_without_token_only_shows() -> Result<()> {
    for (actions, allowed) in [("", false), ("actions = \"any-client\"\n", true)] {
        let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let http = format!("[http]\nlisten = \"{free}\"\n{actions}");
        let world = TestbedConfig::default().config(&format!("{MANUAL}{http}")).world()?;
        let mut worker = Worker::start(&world, "worker", 64)?;
        let key = world.cli().wait_for_state("worker", "Idle")?.key;
        let ask =
            |method: &str, path: &str| ask_over(std::net::TcpStream::connect(free)?, method, path);
        assert_eq!(ask("GET", "/api/v1/node")?.0, 200);
        assert_eq!(ask("GET", "/metrics")?.0, 200);
        let changes = ["offload", "pin", "unpin", "restore"];
        for path in changes.map(|verb| format!("/api/v1/containers/{key}/{verb}")) {
            let (status, said) = ask("POST", &path)?;
            assert_eq!(status == 200, allowed, "{path}: {status} {said}");
            assert!(allowed || said.contains("http.token_file"), "{said}");
        }
        assert_eq!(ask("POST", "/api/v1/auto-offload/on")?.0 == 200, allowed);
        let row = world.cli().known("worker")?;
        assert_eq!(row.offloads > 0, allowed, "{row:?}");
        assert!(worker.verify()?);
    }
    Ok(())
}
