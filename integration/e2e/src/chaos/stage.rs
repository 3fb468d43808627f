//! The world of a campaign: containers that want more VRAM than there is.

use std::{
    os::unix::net::UnixStream,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::{
    actor::{Actor, Verdict, Way},
    census::Census,
    fault,
    plan::{CAST, TWINS},
    report::Finding,
    watch::Watch,
};
use crate::{
    cli::GpuRow,
    gpu::Gpu,
    hazards::ballast,
    processes,
    until::{PATIENCE, until},
    worker::Worker,
    world::{MIB, Recipe, World},
};

/// Idle and away at once, looked at often.
const CONFIG: &str = r#"
[policy]
mode = "eager"
idle_timeout = "60ms"
minimum_residency = "1ms"
dedup = true
[timing]
sample_interval = "20ms"
[memory]
driver_overhead_mib = 64
node_reserve_mib = 64
[history]
dir = "off"
"#;
/// A move of the simulated driver takes so long, in milliseconds: time to be struck in.
const MOVE_MS: &str = "30";
/// Room for the largest container (a twin, 160 MiB) where all others are parked and keep their
/// contexts (six of 16 MiB, and the vault's), not for the whole cast.
const SIMULATED_BYTES: u64 = 288 * MIB;
/// What a twin holds: what can be held once, and a rest that cannot.
const TWIN_MIB: u64 = 144;
/// Twins that leave so often and hold nothing together are let be.
const TURNS: usize = 2;
/// How long that is waited for.
const SOON: Duration = Duration::from_millis(500);
/// The same on a GPU whose contexts have half a GiB.
const REAL_ROOM_BYTES: u64 = 4_096 * MIB;
/// What a real driver may keep beyond that of moved processes.
const DRIVER_BYTES: u64 = 64 * MIB;
/// Whoever is started has the next of these, whatever its role.
const WAYS: [Way; 7] = [
    Way::DRIVER,
    Way { engine: "auto", ..Way::FAST },
    Way { engine: "park", ..Way::FAST },
    Way::FAST,
    Way { engine: "park", keeps: true, ..Way::FAST },
    Way { keeps: true, ..Way::FAST },
    Way { prepares: true, ..Way::FAST },
];
/// What must happen after a round happens in this time, and mostly in far less.
const SETTLED: Duration = Duration::from_secs(20);

/// A world and its cast.
pub struct Stage {
    /// Dropped first: it follows the world's controller.
    pub watch: Watch,
    /// The containers.
    pub cast: Vec<Actor>,
    /// Takes the room that a large GPU has too much of.
    ballast: Option<Worker>,
    /// Where it all is.
    pub world: World,
    quiet: Option<Census>,
    quiet_bytes: u64,
    started: u64,
    returns: Vec<JoinHandle<Option<Duration>>>,
}

impl Stage {
    /// Makes a world and starts the cast, one after the other.
    ///
    /// # Errors
    /// When a container does not start.
    pub fn build(recipe: Recipe, gpu: &Gpu) -> Result<Self> {
        let gpu = match gpu {
            Gpu::Simulated { .. } => Gpu::Simulated { vram_bytes: SIMULATED_BYTES },
            Gpu::Real => Gpu::Real,
        };
        // What a real driver keeps for itself is seen when nobody else holds anything.
        let quiet_bytes = if matches!(gpu, Gpu::Real) { u64::MAX } else { 0 };
        let recipe = recipe.config(CONFIG).gpu(gpu).sim_options(&[
            "--checkpoint-fixed-ms",
            MOVE_MS,
            "--restore-fixed-ms",
            MOVE_MS,
        ]);
        let world = recipe.world()?;
        let watch = Watch::start(world.cli());
        let mut stage = Self {
            watch,
            cast: Vec::new(),
            ballast: None,
            world,
            quiet: None,
            quiet_bytes,
            started: 0,
            returns: Vec::new(),
        };
        for role in 0..CAST.len() {
            let actor = stage.start(role)?;
            stage.cast.push(actor);
            if role == 0 && matches!(stage.world.gpu(), Gpu::Real) {
                stage.take_ballast()?;
            }
        }
        stage.rest()?;
        stage.bring_together()?;
        stage.quiet = Some(stage.census()?);
        Ok(stage)
    }

    /// On a large GPU something unmanaged leaves only a little to those who are managed.
    fn take_ballast(&mut self) -> Result<()> {
        self.rest()?;
        self.ballast = Some(ballast(&self.world, REAL_ROOM_BYTES)?);
        self.quiet_bytes = until("the ballast to be seen", || {
            let gpus = self.world.cli().ps()?.gpus;
            let gpu = gpus.first().context("there is no GPU")?;
            let taken = gpu.vram_used_bytes + 2 * REAL_ROOM_BYTES > gpu.vram_total_bytes;
            Ok(taken.then_some(gpu.vram_used_bytes + DRIVER_BYTES))
        })?;
        Ok(())
    }

    fn census(&self) -> Result<Census> {
        let ballast = self.ballast.as_ref().map(|ballast| ballast.running.pid(&self.world));
        Census::take(&self.world, &self.cast, ballast.transpose()?.as_slice())
    }

    fn mib(&self, role: usize) -> u64 {
        match self.world.gpu() {
            _ if TWINS.contains(&role) => TWIN_MIB,
            Gpu::Real => 128,
            Gpu::Simulated { .. } => 20,
        }
    }

    /// Whether the twins hold once what they have in common.
    #[must_use]
    pub fn is_together(&self) -> bool {
        let sealed = |role: &usize| {
            let process = self.cast.get(*role)?.processes.first()?;
            processes::sealed_files(process.pid.as_raw()).ok().filter(|files| !files.is_empty())
        };
        let [one, other] = TWINS.each_ref().map(sealed);
        one.is_some() && one == other
    }

    /// Has them come home and leave until they do, a few times: who left while there was no vault holds
    /// nothing with others, nor does who was touched less.
    ///
    /// # Errors
    /// When one does not come home, or does not leave.
    pub fn bring_together(&mut self) -> Result<()> {
        for _ in 0..TURNS {
            if self.is_soon_together() {
                return Ok(());
            }
            let mut most = 0;
            for role in TWINS.into_iter().cycle().take(2 * TWINS.len()) {
                let twin = self.cast[role].processes.first_mut().context("no process")?;
                for _ in twin.touches..most {
                    twin.ask("touch")?;
                }
                twin.ask("verify")?;
                match twin.settle(Instant::now() + PATIENCE) {
                    Verdict::Well => most = twin.touches,
                    verdict => bail!("a twin does not come home: {verdict:?}"),
                }
                // There is no room for both, and where room is short there is no vault.
                self.rest()?;
            }
        }
        Ok(())
    }

    fn is_soon_together(&self) -> bool {
        let deadline = Instant::now() + SOON;
        while !self.is_together() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Starts a container of the cast, when everybody else is away.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(&mut self, role: usize) -> Result<Actor> {
        self.rest()?;
        self.started += 1;
        let id = format!("c{role}-{}", self.started);
        let processes = CAST.get(role).copied().unwrap_or(1);
        let turn = usize::try_from(self.started).unwrap_or(0);
        let shares = TWINS.contains(&role);
        // Other ways leave nothing with the vault that could be held together.
        let ways: Vec<Way> =
            WAYS.into_iter().filter(|way| !shares || way.engine == Way::FAST.engine).collect();
        let way = Way { shares, ..ways[(role + turn) % ways.len()] };
        Actor::start(&self.world, &id, processes, self.mib(role), way)
            .with_context(|| format!("cannot start {id}"))
    }

    /// Lets everybody answer what is owed and verify; what does not is a finding.
    pub fn verify(&mut self, round: u64, verified: &mut u64) -> Vec<Finding> {
        let deadline = Instant::now() + PATIENCE;
        let mut found = Vec::new();
        let mut find = |kind, text| found.push(Finding { round, kind, text });
        for actor in self.cast.iter_mut().filter(|actor| !actor.doomed) {
            for process in actor.processes.iter_mut().filter(|process| !process.doomed) {
                if let Err(error) = process.ask("verify") {
                    find("error", format!("{}: {error:#}", actor.running.id));
                }
            }
        }
        for actor in &mut self.cast {
            let id = actor.running.id.clone();
            if actor.doomed {
                continue;
            }
            for process in &mut actor.processes {
                if process.doomed {
                    continue;
                }
                match process.settle(deadline) {
                    Verdict::Well => *verified += 1,
                    Verdict::Lost(text) => find("lost", format!("{id}: {text}")),
                    Verdict::Stuck(text) => find("stuck", format!("{id}: {text}")),
                    Verdict::Corrupted(text) => find("corrupted", format!("{id}: {text}")),
                }
            }
            match actor.settle_guest(&self.world, deadline) {
                Verdict::Well => {}
                Verdict::Lost(text) => find("lost", format!("{id}: {text}")),
                Verdict::Stuck(text) => find("stuck", format!("{id}: {text}")),
                Verdict::Corrupted(text) => find("corrupted", format!("{id}: {text}")),
            }
        }
        found
    }

    /// What was meant to end has ended, and is replaced.
    ///
    /// # Errors
    /// When it does not end, or the next does not start.
    pub fn replace(&mut self) -> Result<()> {
        for role in 0..self.cast.len() {
            if self.cast[role].is_whole() {
                continue;
            }
            let doomed: Vec<_> =
                self.cast[role].processes.iter().filter(|p| p.doomed).map(|p| p.pid).collect();
            for pid in doomed {
                until(&format!("process {pid} to end, as it was told"), || {
                    Ok(super::actor::has_ended(pid).then_some(()))
                })?;
            }
            fault::remove(&self.world, &mut self.cast[role])?;
            self.cast[role] = self.start(role)?;
        }
        Ok(())
    }

    /// Moves everybody out, and waits until no VRAM is held but by those who park.
    ///
    /// # Errors
    /// When somebody does not go.
    pub fn rest(&self) -> Result<()> {
        let mut last = String::new();
        let asked = Instant::now();
        until("everybody to be away", || {
            let Ok(node) = self.world.cli().ps_now() else {
                // With no container there is no controller; else it is about to come back.
                return Ok((self.cast.is_empty()).then_some(()));
            };
            let staying: Vec<_> = node
                .containers
                .iter()
                .filter(|row| row.state != "Offloaded" && row.id != "ballast")
                .filter(|row| row.state != "Unregistered")
                .collect();
            last = staying
                .iter()
                .map(|row| format!("{}: {} ({}) ", row.id, row.state, row.reason))
                .collect();
            for row in &staying {
                let home = matches!(row.state.as_str(), "Active" | "Idle");
                if home && asked.elapsed() > Duration::from_millis(200) {
                    // One that an earlier failure keeps here.
                    let _ = self.world.cli().output(&["offload", &row.id, "-o", "json"])?;
                }
            }
            // What the vault has of its own is there as long as it is.
            let used = |gpu: &GpuRow| gpu.vram_used_bytes.saturating_sub(gpu.vault_vram_bytes);
            let used = node.gpus.first().map_or(0, used);
            // What a copy leaves there.
            let processes = node.containers.iter().flat_map(|row| &row.processes);
            let parked = processes.filter(|process| process.phase == "Parked");
            let left: u64 = parked.map(|process| process.vram_bytes).sum();
            if staying.is_empty() {
                last = format!("{used} bytes in use, {left} of them by contexts of the parked");
            }
            let empty = used <= self.quiet_bytes.saturating_add(left) || node.gpus.is_empty();
            Ok((staying.is_empty() && empty).then_some(()))
        })
        .with_context(|| format!("last seen: {last}"))
    }

    /// What is there that was not there when the world was new.
    ///
    /// # Errors
    /// When it cannot be counted.
    pub fn leaks(&self) -> Result<Vec<String>> {
        let Some(first) = &self.quiet else { return Ok(Vec::new()) };
        let deadline = Instant::now() + SETTLED;
        loop {
            let found = match self.census() {
                Ok(now) => now.differences(first),
                Err(error) => vec![format!("{error:#}")],
            };
            if found.is_empty() || Instant::now() > deadline {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The controller is about to be killed: how long until another one can be reached?
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn time_return(&mut self) -> Result<()> {
        let Some(old) = self.world.controller()? else { return Ok(()) };
        let socket = self.world.cli().run_dir().join("control.sock");
        self.returns.push(std::thread::spawn(move || {
            let began = Instant::now();
            while began.elapsed() < SETTLED {
                let other = UnixStream::connect(&socket).ok().and_then(|stream| {
                    let peer = getsockopt(&stream, PeerCredentials).ok()?;
                    (peer.pid() != old.pid.as_raw()).then_some(())
                });
                if other.is_some() {
                    return Some(began.elapsed());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        }));
        Ok(())
    }

    /// The longest of the returns since it was last asked, in milliseconds; 0 without one.
    pub fn longest_return_ms(&mut self) -> u64 {
        let returns = self.returns.drain(..).filter_map(|thread| thread.join().ok().flatten());
        returns.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX)).max().unwrap_or(0)
    }
}
