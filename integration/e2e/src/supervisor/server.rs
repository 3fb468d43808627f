//! The main function of the supervisor, the program `affinode-keeper`.

use std::{
    fs::OpenOptions,
    io::{BufRead, Write},
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    sys::{
        prctl,
        wait::{Id, WaitPidFlag, waitid},
    },
    unistd::setsid,
};

use super::{Job, Reply, Scope, cleanup, mounts, tunables::Tunables};

/// Serves requests from standard input until it is closed, then ends and removes everything in the
/// testbed.
///
/// # Errors
/// When the namespace cannot be created, or a process, mount or folder cannot be removed.
pub fn serve(world: &Path, scope: Scope) -> Result<()> {
    // A session of its own makes Ctrl-C on the terminal reach only the parent, which then ends the
    // testbed. `setsid` fails only if the process already leads a session.
    let _ = setsid();
    prctl::set_child_subreaper(true).context("cannot become a subreaper")?;
    mounts::make_private(world, scope)?;
    let tunables = (scope == Scope::Node).then(Tunables::remember);
    let reaper = Reaper::start();
    answer(&Reply::Pid(std::process::id()))?;
    for line in std::io::stdin().lock().lines() {
        // A broken pipe ends the testbed, as the end of the input does.
        let Ok(line) = line else { break };
        let reply = match serde_json::from_str::<Job>(&line)
            .map_err(Into::into)
            .and_then(|job| start(&job))
        {
            Ok(pid) => Reply::Pid(pid),
            Err(error) => Reply::Error(format!("{error:#}")),
        };
        reaper.look_again();
        if answer(&reply).is_err() {
            break;
        }
    }
    cleanup::kill_descendants()?;
    if let Some(tunables) = tunables {
        tunables.put_back();
    }
    mounts::unmount_below(world)?;
    cleanup::remove_cgroups(world);
    std::fs::remove_dir_all(world).with_context(|| format!("cannot remove {}", world.display()))
}

fn start(job: &Job) -> Result<u32> {
    let (program, arguments) = job.argv.split_first().context("the request names no program")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(&job.log)
        .with_context(|| format!("cannot open {}", job.log.display()))?;
    let child = Command::new(program)
        .args(arguments)
        .envs(&job.env)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    // The reaper collects the child, so the handle is not needed.
    Ok(child.id())
}

fn answer(reply: &Reply) -> Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    Ok(stdout.flush()?)
}

/// Thread that reaps every child that has ended, including orphaned descendants, so that no zombies
/// remain.
struct Reaper {
    started: Arc<(Mutex<u64>, Condvar)>,
}

impl Reaper {
    fn start() -> Self {
        let started = Arc::new((Mutex::new(0), Condvar::new()));
        let shared = Arc::clone(&started);
        std::thread::spawn(move || {
            let (count, changed) = &*shared;
            let mut seen = 0;
            loop {
                match waitid(Id::All, WaitPidFlag::WEXITED) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    // A process without children has no descendants either. The reaper waits until
                    // a child is started.
                    Err(_) => {
                        let guard = count.lock().unwrap_or_else(PoisonError::into_inner);
                        let guard = changed
                            .wait_while(guard, |count| *count == seen)
                            .unwrap_or_else(PoisonError::into_inner);
                        seen = *guard;
                    }
                }
            }
        });
        Self { started }
    }

    fn look_again(&self) {
        let (count, changed) = &*self.started;
        *count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        changed.notify_all();
    }
}
