//! Tests that no process outlives a supervisor (the process that owns a testbed), even if its
//! parent is killed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use affinode_e2e::{
    supervisor::{Job, Keeper, Scope},
    wait::until,
};
use anyhow::{Context, Result};

const KEEPER: &str = env!("CARGO_BIN_EXE_affinode-keeper");

fn world(name: &str) -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("afk-{}-{name}", std::process::id()));
    std::fs::create_dir(&dir)?;
    Ok(dir)
}

/// Returns a job that starts processes that are hard to find: background processes, a process in a
/// session of its own, and an orphan. `mark` occurs in their command lines.
fn flee(mark: &str) -> Job {
    let script = format!(
        "sleep {mark} & setsid sleep {mark} & (setsid sh -c 'setsid sleep {mark} &' &) ; mount -t tmpfs x \"$DIR\"; wait"
    );
    Job {
        argv: vec!["sh".into(), "-c".into(), script],
        env: BTreeMap::new(),
        log: "/dev/null".into(),
    }
}

fn with_mark(mark: &str) -> Result<usize> {
    let mut found = 0;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        found += usize::from(command == format!("sleep\0{mark}\0"));
    }
    Ok(found)
}

fn mounted_below(dir: &Path) -> Result<bool> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(table.contains(&dir.display().to_string()))
}

#[test]
fn dropping_it_ends_everything() -> Result<()> {
    let dir = world("drop")?;
    let mark = "98761";
    let keeper = Keeper::start(Path::new(KEEPER), &dir, Scope::default())?;
    let mut job = flee(mark);
    std::fs::create_dir(dir.join("mounted"))?;
    job.env.insert("DIR".into(), dir.join("mounted").display().to_string());
    keeper.spawn(&job)?;
    until("the children", || Ok((with_mark(mark)? == 3).then_some(())))?;
    // The testbed's mounts must not be visible in the machine's mount namespace.
    assert!(!mounted_below(&dir)?);
    drop(keeper);
    assert_eq!(with_mark(mark)?, 0);
    assert!(!dir.exists());
    Ok(())
}

/// Kills the supervisor's parent with SIGKILL, as a test or the demo may be killed. The supervisor
/// notices this only because its pipe is closed. It must end all processes.
#[test]
fn the_death_of_its_parent_ends_everything() -> Result<()> {
    let dir = world("death")?;
    let mark = "98762";
    // The parent is a shell. It starts the supervisor, requests a job, and is killed.
    let mut job = flee(mark);
    job.env.insert("DIR".into(), dir.join("mounted").display().to_string());
    let request = serde_json::to_string(&job)?;
    let script = "(printf '%s\\n' \"$REQUEST\"; sleep 1000) | \"$KEEPER\" \"$WORLD\"";
    let mut parent = Command::new("setsid")
        .args(["sh", "-c", script])
        .env("REQUEST", request)
        .env("KEEPER", KEEPER)
        .env("WORLD", &dir)
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start a shell")?;
    until("the children", || Ok((with_mark(mark)? == 3).then_some(())))?;
    // The signal reaches the whole session of the parent. The supervisor runs in another session.
    Command::new("kill").args(["-9", "--", &format!("-{}", parent.id())]).status()?;
    parent.wait()?;
    until("the children to end", || Ok((with_mark(mark)? == 0).then_some(())))?;
    until("the folder to be removed", || Ok((!dir.exists()).then_some(())))
}
