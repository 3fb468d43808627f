//! Test of the log entries that the controller writes to systemd's journal. The test simulates the
//! journal with a socket, in a mount namespace of the controller.

use std::{
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use affinode_e2e::{artifacts::Artifacts, cli::Cli, wait::until};
use anyhow::{Context, Result};

/// Shell script that mounts the folder of the test's socket at the journal's path and then starts
/// the controller. Only the script and its children see this mount.
const PLACE: &str = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && \
    mount --bind \"$1\" /run/systemd/journal && exec \"$2\" controller";

struct Controller(Child);

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for the journal entry that contains this text, and returns it.
fn entry(journal: &UnixDatagram, text: &str) -> Result<String> {
    let mut buffer = [0; 64 << 10];
    loop {
        let bytes = journal.recv(&mut buffer).with_context(|| format!("no entry with {text:?}"))?;
        let entry = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
        if entry.contains(text) {
            return Ok(entry);
        }
    }
}

#[test]
fn events_are_journal_entries_with_fields() -> Result<()> {
    let artifacts = Artifacts::find()?;
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir(at("journal"))?;
    let journal = UnixDatagram::bind(at("journal").join("socket"))?;
    journal.set_read_timeout(Some(Duration::from_secs(60)))?;
    std::fs::write(at("config.toml"), "[log]\nformat = \"journald\"\n")?;
    let shim = artifacts.bin("containerd-shim-affinode-v1")?;
    let _controller = Controller(
        Command::new("unshare")
            .args(["--mount", "sh", "-c", PLACE, "sh"])
            .args([at("journal"), shim])
            .env("AFFINODE_RUN_DIR", at("run"))
            .env("AFFINODE_CONFIG", at("config.toml"))
            .spawn()?,
    );
    let ready = entry(&journal, "controller is ready")?;
    assert!(has(&ready, "SYSLOG_IDENTIFIER", "affinode"), "{ready}");
    assert!(ready.contains("AFFINODE_VERSION"), "{ready}");
    let cli = Cli::new(artifacts.bin("affinode")?, at("run"));
    until("the controller to reply", || {
        let answered = cli.output(&["auto-offload", "off"])?.status.success();
        Ok(answered.then_some(()))
    })?;
    let event = entry(&journal, "auto-offload was turned off")?;
    for (field, value) in
        [("AFFINODE_KIND", "request"), ("AFFINODE_REASON", "requested"), ("PRIORITY", "5")]
    {
        assert!(has(&event, field, value), "{field}: {event}");
    }
    assert!(Path::new(&at("run")).exists());
    Ok(())
}

/// Whether a journal entry contains a field with this value. The journal's protocol has two forms
/// of a field: `NAME=value`, or the name, the value's length in eight bytes, and the value.
fn has(entry: &str, field: &str, value: &str) -> bool {
    entry.contains(&format!("{field}={value}\n"))
        || entry
            .split_once(&format!("{field}\n"))
            .is_some_and(|(_, rest)| rest.chars().skip(8).collect::<String>().starts_with(value))
}
