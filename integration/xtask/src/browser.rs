//! `cargo xtask browser`: tests the dashboard in a headless Chromium, with containers on a
//! simulated GPU, and with a thousand synthetic rows. It is not part of `cargo xtask test`, because
//! few machines have a browser.

use std::{path::PathBuf, process::Command, sync::mpsc::RecvTimeoutError, time::Duration};

use affinode_e2e::{
    artifacts::workspace_dir,
    gpu::Gpu,
    testbed::{MIB, TestbedConfig},
    worker::Worker,
};
use anyhow::{Result, bail};
use clap::Args;

use crate::{
    build,
    demo::dashboard::{config, free_address},
    deps, output, sh,
};

/// Configuration of the controller in which containers are offloaded only on request of the test.
const CONFIG: &str = r#"
[policy]
mode = "manual"
idle_timeout = "1s"
minimum_residency = "1ms"
engine = "full"
retain_host_copy = true
[timing]
sample_interval = "100ms"
"#;

#[derive(Args)]
pub struct Options {
    /// Folder that gets the screenshots.
    #[arg(long)]
    screenshots: Option<PathBuf>,
    /// Start no containers, and only replay a stream of dashboard data from FILE. The part
    /// `dashboard` of the GPU kit records such a stream.
    #[arg(long, value_name = "FILE")]
    recorded: Option<PathBuf>,
}

/// Builds the programs, starts three containers, and runs the browser test against them.
pub fn run(options: &Options) -> Result<()> {
    let folder = workspace_dir().join("integration/browser");
    // browser.mjs uses the same path if CHROMIUM is not set.
    let chromium = std::env::var("CHROMIUM").unwrap_or_else(|_| "/usr/bin/chromium".into());
    for tool in ["node", "npm", &chromium] {
        if sh::read(Command::new(tool).arg("--version")).is_err() {
            bail!("{tool} is missing: apt-get install nodejs npm chromium");
        }
    }
    let install = ["install", "--silent", "--no-package-lock", "--no-audit", "--no-fund"];
    sh::run(Command::new("npm").args(install).current_dir(&folder))?;
    let shots = options.screenshots.as_ref().map(std::path::absolute).transpose()?;
    let page = workspace_dir().join("controller/src/http/page");
    let node = |script: &str| {
        let mut node = Command::new("node");
        node.current_dir(&folder).arg(script);
        node
    };
    if let Some(recording) = &options.recorded {
        let recording = std::path::absolute(recording)?;
        return sh::run(node("recorded.mjs").arg(page).arg(recording).args(shots));
    }
    let release = deps::own()?;
    let artifacts = build::all(build::Profile::Dev)?;
    let address = free_address()?;
    let world = TestbedConfig::default()
        .artifacts(artifacts)
        .release(&release)
        .gpu(Gpu::Simulated { vram_bytes: 1024 * MIB })
        .config(&config(CONFIG, Some(address)))
        .world()?;
    let _workers = [Worker::start(&world, "first", 256)?, Worker::start(&world, "second", 128)?];
    let mut watched = Worker::start(&world, "watched", 64)?;
    // This container makes calls until the browser test ends.
    let (ended, busy) = std::sync::mpsc::channel::<()>();
    let caller = std::thread::spawn(move || {
        while busy.recv_timeout(Duration::from_millis(2)) == Err(RecvTimeoutError::Timeout) {
            if watched.call("streamsync").is_err() {
                break;
            }
        }
    });
    let live = PathBuf::from(format!("http://{address}"));
    for (script, place) in [("demo.mjs", live), ("many.mjs", page)] {
        output::step(&format!("Browser: {script}"));
        sh::run(node(script).arg(place).args(&shots))?;
    }
    drop(ended);
    let _ = caller.join();
    Ok(())
}
