//! Simulates systemd for the controller's unit. A script `systemctl` sends its arguments to this
//! program, which runs the unit's command in the testbed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{installed::Installation, supervisor::Job, testbed::Testbed, wait::until};

/// Name of the controller's systemd unit.
const UNIT: &str = "affinode-controller";
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The simulated systemd of a testbed.
pub struct SimulatedSystemd<'a> {
    world: &'a Testbed,
    folder: PathBuf,
    state: Mutex<UnitRun>,
}

#[derive(Default)]
struct UnitRun {
    /// Text of the unit's file at the last `systemctl daemon-reload`. `None` if it was never
    /// loaded.
    loaded: Option<String>,
    enabled: bool,
    pid: Option<i32>,
    calls: Vec<String>,
    /// Arguments with which `systemctl` must fail.
    broken: Option<String>,
}

impl<'a> SimulatedSystemd<'a> {
    /// Creates a simulated systemd for an installation. Writes a script `systemctl` into a folder
    /// of the installation's PATH.
    ///
    /// # Errors
    /// When the script cannot be written.
    pub fn new(world: &'a Testbed, place: &Installation<'_>) -> Result<Self> {
        let folder = world.dir().join("systemd");
        fs::create_dir_all(&folder)?;
        let at = folder.display();
        place.tool(
            "systemctl",
            &format!(
                "#!/bin/sh\ncd {at} || exit 9\nrm -f done\necho \"$*\" >asked.new\n\
                 mv asked.new asked\nwhile [ ! -e done ]; do sleep 0.02; done\n\
                 cat said\nexit \"$(cat done)\"\n"
            ),
        )?;
        Ok(Self { world, folder, state: Mutex::default() })
    }

    /// Folder that contains the unit files.
    #[must_use]
    pub fn units(&self) -> PathBuf {
        self.folder.join("system/units")
    }

    /// Path of the controller's unit file.
    #[must_use]
    pub fn unit(&self) -> PathBuf {
        self.units().join(format!("{UNIT}.service"))
    }

    /// Pid of the unit's process. `None` while it does not run.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.state().pid
    }

    /// Whether the unit is enabled, so that it starts with the machine.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.state().enabled
    }

    /// Makes `systemctl` fail when it is called with these arguments. With `None` it never fails.
    pub fn break_on(&self, arguments: Option<&str>) {
        self.state().broken = arguments.map(str::to_owned);
    }

    /// Returns the arguments of each call of `systemctl` since the last call of this function.
    /// Queries are omitted.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.state().calls)
    }

    /// Runs `work`. While it runs, executes every call of `systemctl` that arrives.
    ///
    /// # Errors
    /// When `work` fails, or the controller's unit cannot be started or stopped.
    pub fn answering<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let (asked, done) = (self.folder.join("asked"), self.folder.join("done"));
        thread::scope(|scope| {
            let worker = scope.spawn(work);
            while !worker.is_finished() {
                if let Ok(arguments) = fs::read_to_string(&asked) {
                    fs::remove_file(&asked)?;
                    let (code, said) = self.call(arguments.trim())?;
                    fs::write(self.folder.join("said"), said)?;
                    let fresh = done.with_extension("new");
                    fs::write(&fresh, code)?;
                    fs::rename(fresh, &done)?;
                }
                thread::sleep(LOOK_EVERY);
            }
            worker.join().map_err(|_| anyhow::anyhow!("the command's thread panicked"))?
        })
    }

    /// Executes a call of `systemctl` with these arguments. Returns its exit status and output.
    ///
    /// # Errors
    /// When the controller's unit cannot be started or stopped.
    pub fn call(&self, arguments: &str) -> Result<(&'static str, String)> {
        let name = format!(" {UNIT}");
        let verb = arguments.strip_suffix(&name).unwrap_or(arguments);
        if verb.starts_with("show ") {
            return Ok(("0", self.properties()));
        }
        let mut state = self.state();
        state.calls.push(arguments.to_owned());
        if state.broken.as_deref() == Some(arguments) {
            return Ok(("1", String::new()));
        }
        match verb {
            "daemon-reload" => state.loaded = fs::read_to_string(self.unit()).ok(),
            "enable --now" if state.loaded.is_none() => return Ok(("5", String::new())),
            "enable --now" => {
                state.enabled = true;
                self.start(&mut state)?;
            }
            "start" => self.start(&mut state)?,
            "stop" => self.stop(&mut state)?,
            // systemd keeps the sockets of a unit that it restarts, so no shim starts a controller
            // during the restart. For the same effect, this simulation starts the next controller
            // before it ends the earlier controller. The next controller waits for the lock.
            "try-restart" if state.pid.is_some() => {
                let mut next = UnitRun { loaded: state.loaded.clone(), ..UnitRun::default() };
                self.start(&mut next)?;
                next.pid.map_or(Ok(()), waits_for_lock)?;
                self.stop(&mut state)?;
                state.pid = next.pid;
            }
            "try-restart" => {}
            "disable --now" => {
                state.enabled = false;
                self.stop(&mut state)?;
            }
            _ => return Ok(("64", String::new())),
        }
        Ok(("0", String::new()))
    }

    /// Waits until the unit's controller is blocked on the lock that another controller holds.
    ///
    /// # Errors
    /// When the unit's controller does not wait for the lock in time.
    pub fn wait_for_waiting(&self) -> Result<()> {
        waits_for_lock(self.pid().context("the unit does not run")?)
    }

    fn properties(&self) -> String {
        let state = self.state();
        let active = if state.pid.is_some() { "active" } else { "inactive" };
        let enabled = if state.enabled { "enabled" } else { "disabled" };
        let pid = state.pid.unwrap_or(0);
        format!("MainPID={pid}\nActiveState={active}\nUnitFileState={enabled}\n")
    }

    /// Runs the unit's command with the environment variables of the unit.
    fn start(&self, state: &mut UnitRun) -> Result<()> {
        if state.pid.is_some() {
            return Ok(());
        }
        let text = state.loaded.as_deref().context("no unit is loaded")?;
        let values =
            |key: &'static str| text.lines().filter_map(move |line| line.strip_prefix(key));
        let command = values("ExecStart=").next().context("the unit runs no program")?;
        let mut env = self.world.gpu().host_env(self.world.artifacts(), self.world.dir());
        env.extend(values("Environment=").filter_map(|one| {
            one.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
        }));
        // The variable is set because systemd sets it, but no process reads the notifications.
        env.insert("NOTIFY_SOCKET".into(), self.folder.join("notify").display().to_string());
        let argv = command.split(' ').map(str::to_owned).collect();
        let job = Job { argv, env: BTreeMap::from_iter(env), log: self.folder.join("log") };
        state.pid = Some(i32::try_from(self.world.keeper().spawn(&job)?)?);
        Ok(())
    }

    fn stop(&self, state: &mut UnitRun) -> Result<()> {
        let Some(pid) = state.pid.take() else { return Ok(()) };
        kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        let process = Path::new("/proc").join(pid.to_string());
        until("the unit to stop", || Ok((!process.exists()).then_some(())))
    }

    fn state(&self) -> MutexGuard<'_, UnitRun> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits until a process is blocked on a file lock.
fn waits_for_lock(pid: i32) -> Result<()> {
    let pid = pid.to_string();
    until("the unit to wait for the lock", || {
        let locks = fs::read_to_string("/proc/locks")?;
        let waits = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.contains(&"->") && words.contains(&pid.as_str())
        };
        Ok(locks.lines().any(waits).then_some(()))
    })
}
