//! Tests of containers that hold a GPU but make no progress.

use affinode_e2e::{testbed::TestbedConfig, wait::until, worker::Worker};
use anyhow::Result;

/// Configuration in which a container without progress is reported soon. The kernel of the tests
/// runs for much longer than a test.
const IMPATIENT: &str = r#"
[policy]
no_progress_timeout = "1s"
[timing]
sample_interval = "50ms"
"#;
const ENDLESS_KERNEL: &str = "spin 3600000";

/// Runs a kernel that does not end. The container must be shown as one without progress, with the
/// evidence, and must continue. After the operator has set `on_no_progress = "end"`, its process
/// must be ended.
#[test]
fn endless_kernel_is_reported_then_ended() -> Result<()> {
    let world = TestbedConfig::default().config(IMPATIENT).world()?;
    let mut worker = Worker::start(&world, "stuck", 32)?;
    worker.call(ENDLESS_KERNEL)?;
    world.cli().wait_for_event("no progress", |event| {
        event.kind == "no-progress" && event.text.contains("no CUDA call has begun")
    })?;
    let warned = until("the warning of the container", || {
        let row = world.cli().container("stuck")?.unwrap_or_default();
        Ok(row.warnings.into_iter().find(|text| text.starts_with("no progress for ")))
    })?;
    assert!(warned.contains("of the GPU's time"), "{warned}");
    let config = IMPATIENT.replace("[timing]", "on_no_progress = \"end\"\n[timing]");
    std::fs::write(world.dir().join("affinode/config.toml"), config)?;
    world.cli().run(&["reload"])?;
    world.cli().wait_for_event("the end of its process", |event| {
        event.kind == "ended" && event.reason == "no-progress"
    })?;
    until("its process to end", || {
        let row = world.cli().container("stuck")?;
        Ok(row.is_none_or(|row| row.processes.is_empty()).then_some(()))
    })
}
