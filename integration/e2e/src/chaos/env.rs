//! The environment of a crash campaign: a testbed with containers that together need more VRAM than
//! the GPU has.

use std::{
    collections::BTreeSet,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    container::{ChaosContainer, Verdict, Way},
    fault,
    leak_check::LeakCheck,
    plan::{TWINS, WORKLOADS},
    report::Finding,
    setup::Setup,
    vram::{self, Allowed},
    watch::Watch,
};
use crate::{
    cli::ContainerRow,
    gpu::Gpu,
    hazards::ballast_on,
    memory_cgroup, oom, processes,
    supervisor::cgroup_folders,
    testbed::{MIB, Testbed, TestbedConfig},
    wait::{until, until_within},
    worker::Worker,
};

/// Affinode's configuration for the campaign, with a short idle timeout and frequent checks.
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
/// VRAM of the simulated GPU. It does not suffice for all containers at once. It suffices for a
/// twin (144 MiB and a context of 16 MiB), which is the largest container, while all other
/// containers are copied out. The other containers then keep six contexts of 16 MiB each, and the
/// copier has one context.
const SIMULATED_BYTES: u64 = 288 * MIB;
/// VRAM of each GPU in a campaign with two simulated GPUs. On the first GPU, it suffices for the
/// copier and one twin, but not for both twins. On the second GPU, it suffices for each of the two
/// remaining containers while the other one is copied out.
const SIMULATED_EACH_BYTES: u64 = 208 * MIB;
/// VRAM of the simulated GPU in the setup `Squeezed`, in which host memory is limited as well. It
/// suffices for both twins at the same time (160 MiB each with their contexts) and for the contexts
/// of the other containers. It does not suffice for all containers (388 MiB of allocations, and
/// seven contexts).
const SQUEEZED_BYTES: u64 = 448 * MIB;
/// Number of bytes by which the limit of host memory is below the need of all containers while all
/// are offloaded. One twin can be offloaded, but not both twins at once.
const SQUEEZED_BY_BYTES: u64 = 60 * MIB;
/// Reasons that the controller may show for a container that stays resident because host memory
/// does not suffice.
const SHORT_OF_MEMORY: [&str; 2] = ["cgroup-memory", "host-memory"];
/// VRAM of a twin (one of two containers with equal contents), in MiB. Both twins can share a part
/// of their contents.
const TWIN_MIB: u64 = 144;
/// Maximum number of attempts to make the twins share contents. In each attempt, each twin is
/// restored and offloaded.
const TURNS: usize = 2;
/// Time limit until the twins share contents, after both have been offloaded.
const SOON: Duration = Duration::from_millis(500);
/// VRAM that the containers can use on a real GPU. Other programs occupy the remaining VRAM. The
/// value is larger than on the simulated GPU because a real context takes half a GiB.
const REAL_ROOM_BYTES: u64 = 4_096 * MIB;
/// VRAM that the containers can use on the first of two real GPUs. Only the twins use this GPU. The
/// amount suffices for the copier's context and one twin. If the copier was already running when
/// the free VRAM was measured, its context does not count, and both twins fit.
const REAL_ROOM_FOR_TWINS_BYTES: u64 = 1_536 * MIB;
/// VRAM that a real driver may keep for itself, in addition to the contexts of offloaded processes.
const DRIVER_BYTES: u64 = 64 * MIB;
/// VRAM of a context of the simulated driver. It includes the digest table. For the copier it also
/// includes the buffer for copies on the device.
const SIMULATED_CONTEXT_BYTES: u64 = 16 * MIB + MIB / 2;
const SIMULATED_COPIER_BYTES: u64 = SIMULATED_CONTEXT_BYTES + 4 * MIB;
/// Maximum VRAM of a context of the real driver. 530 to 671 MiB were measured.
const REAL_CONTEXT_BYTES: u64 = 768 * MIB;
/// Offload settings that new containers get in turn. A container skips the settings that its role
/// or the setup does not permit.
const WAYS: [Way; 7] = [
    Way::DRIVER,
    Way { engine: "auto", ..Way::FAST },
    Way { engine: "copy", ..Way::FAST },
    Way::FAST,
    Way { engine: "copy", keeps: true, ..Way::FAST },
    Way { keeps: true, ..Way::FAST },
    Way { prepares: true, ..Way::FAST },
];
/// Time limit until the counts of processes, files and mounts equal those of the new environment.
/// Also the time limit until the next controller replies after a kill. Both usually take far less
/// time.
const SETTLED: Duration = Duration::from_secs(20);

/// A testbed of a crash campaign, with its containers.
pub struct ChaosEnv {
    /// The watcher of the controller's events. It is dropped first, because it uses the testbed's
    /// controller.
    pub watch: Watch,
    /// The containers of this environment, by their index in the plan.
    pub cast: Vec<ChaosContainer>,
    /// Setup of this environment: how long offloads take, and whether host memory is limited.
    pub setup: Setup,
    /// Number of GPUs. With two GPUs, the twins use the first GPU and the other containers use the
    /// second GPU.
    gpus: usize,
    /// Unmanaged programs and their process ids. On large GPUs, these programs occupy the VRAM that
    /// the campaign does not need.
    ballast: Vec<(Worker, i32)>,
    /// Names of containers that were not offloaded automatically and needed a manual offload, each
    /// with the reason.
    stayed: BTreeSet<String>,
    /// The testbed with containerd, controller and GPU.
    pub world: Testbed,
    quiet: Option<LeakCheck>,
    started: u64,
    returns: Vec<JoinHandle<Option<Duration>>>,
    /// Folder for disk files, in the setups that use the disk.
    _disk: Option<tempfile::TempDir>,
}

impl ChaosEnv {
    /// Creates the testbed and starts the containers, one after the other.
    ///
    /// # Errors
    /// When the testbed or a container does not start.
    pub fn build(recipe: TestbedConfig, gpu: &Gpu, gpus: usize, setup: Setup) -> Result<Self> {
        let gpu = match gpu {
            Gpu::Simulated { .. } if setup == Setup::Squeezed => {
                Gpu::Simulated { vram_bytes: SQUEEZED_BYTES }
            }
            Gpu::Simulated { .. } if gpus == 2 => {
                Gpu::Simulated { vram_bytes: SIMULATED_EACH_BYTES }
            }
            Gpu::Simulated { .. } => Gpu::Simulated { vram_bytes: SIMULATED_BYTES },
            Gpu::Real => Gpu::Real,
        };
        let mut config = CONFIG.to_owned();
        if setup == Setup::Squeezed {
            // This value equals the simulated driver's real overhead. With a higher value, the
            // controller could refuse evictions that the test expects.
            config = config.replace("driver_overhead_mib = 64", "driver_overhead_mib = 16");
        }
        let disk = setup.disk_folder()?;
        if let Some(folder) = &disk {
            config = setup.with_disk(&config, folder.path())?;
        }
        let recipe = recipe.config(&config).gpu(gpu).sim_options(&[
            "--checkpoint-fixed-ms",
            setup.move_ms(),
            "--restore-fixed-ms",
            setup.move_ms(),
            "--gpus",
            &gpus.to_string(),
        ]);
        let world = recipe.world()?;
        let watch = Watch::start(world.cli());
        let mut stage = Self {
            watch,
            cast: Vec::new(),
            setup,
            gpus,
            ballast: Vec::new(),
            stayed: BTreeSet::new(),
            world,
            quiet: None,
            started: 0,
            returns: Vec::new(),
            _disk: disk,
        };
        for role in 0..WORKLOADS.len() {
            let actor = stage.start(role)?;
            stage.cast.push(actor);
            if role == 0 && matches!(stage.world.gpu(), Gpu::Real) {
                stage.take_ballast()?;
            }
        }
        stage.rest()?;
        if setup == Setup::Squeezed {
            stage.squeeze()?;
        } else if !setup.uses_host_pool() {
            stage.bring_together()?;
        }
        stage.quiet = Some(stage.census()?);
        Ok(stage)
    }

    /// Sets a limit on the host memory of all containers together. The limit is below what they
    /// need while all are offloaded.
    fn squeeze(&mut self) -> Result<()> {
        let folder = memory_cgroup::folder(&self.world)?;
        let all_offloaded = oom::spent_bytes(&folder)?;
        // All containers are offloaded now and use more than the limit. Both twins are pinned until
        // the limit is set.
        for role in TWINS {
            let id = &self.cast[role].running.id;
            self.world.cli().run(&["pin", id])?;
            self.world.cli().wait_resident(id)?;
        }
        let limit = all_offloaded - SQUEEZED_BY_BYTES;
        // The kernel rejects the limit while more memory is in use, and freed memory still counts
        // for a moment.
        until("the kernel to accept the memory limit", || Ok(memory_cgroup::set_limit(&folder, Some(limit)).ok()))
            .with_context(|| {
                let now = oom::spent_bytes(&folder).unwrap_or(0);
                format!("limit {limit} bytes, in use {now}, in use with all containers offloaded {all_offloaded}")
            })?;
        for role in TWINS {
            self.world.cli().run(&["unpin", &self.cast[role].running.id])?;
        }
        Ok(())
    }

    /// Number of container processes that the kernel has killed because host memory did not
    /// suffice.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let folders = cgroup_folders(self.world.dir());
        let own = |actor: &ChaosContainer| {
            let kills =
                folders.iter().filter_map(|folder| oom::kills(&folder.join(&actor.running.id)));
            kills.max().unwrap_or(0)
        };
        self.cast.iter().map(own).sum()
    }

    /// Whether a container may remain resident because host memory does not suffice to offload all
    /// containers.
    fn may_stay(&self, row: &ContainerRow) -> bool {
        self.setup == Setup::Squeezed
            && row.state == "Idle"
            && SHORT_OF_MEMORY.contains(&row.reason.as_str())
    }

    /// Offloads all containers, then starts an unmanaged program on each GPU. The program occupies
    /// the VRAM that the campaign does not need.
    fn take_ballast(&mut self) -> Result<()> {
        self.rest()?;
        for index in 0..self.gpus {
            let room = match (self.gpus, index) {
                (2, 0) => REAL_ROOM_FOR_TWINS_BYTES,
                _ => REAL_ROOM_BYTES,
            };
            let worker = ballast_on(&self.world, index, room)?;
            let pid = worker.running.pid(&self.world)?;
            self.ballast.push((worker, pid));
            until("NVML to show the ballast", || {
                let gpus = self.world.cli().ps()?.gpus;
                let gpu = gpus.get(index).context("the controller does not list the GPU")?;
                let taken = gpu.vram_used_bytes + 2 * REAL_ROOM_BYTES > gpu.vram_total_bytes;
                Ok(taken.then_some(()))
            })?;
        }
        Ok(())
    }

    /// Lists processes that use VRAM although their container should be offloaded. `resident` names
    /// the containers that are not offloaded. The figures come from the driver.
    fn held(&self, resident: &BTreeSet<&str>) -> Result<Vec<String>> {
        let (context, copier, unnamed_bytes) = match self.world.gpu() {
            Gpu::Simulated { .. } => (SIMULATED_CONTEXT_BYTES, SIMULATED_COPIER_BYTES, 0),
            Gpu::Real => (REAL_CONTEXT_BYTES, REAL_CONTEXT_BYTES, DRIVER_BYTES),
        };
        let mut allowed = Allowed { unnamed_bytes, ..Allowed::default() };
        allowed.ballast = self.ballast.iter().map(|(_, pid)| *pid).collect();
        for actor in self.cast.iter().filter(|actor| resident.contains(actor.running.id.as_str())) {
            allowed.ballast.extend(actor.processes.iter().map(|one| one.pid.as_raw()));
        }
        for process in self.world.processes(fault::COPIER)? {
            allowed.by_pid.insert(process.pid.as_raw(), copier);
        }
        let mut found = Vec::new();
        for index in 0..self.gpus {
            let mut here = allowed.clone();
            // The engines `copy` and `auto` may keep a process's context, on the GPU of its
            // container. So may `full` while host memory is short. Processes of other engines keep
            // no VRAM.
            let is_short = self.setup == Setup::Squeezed;
            let keeps = |actor: &&ChaosContainer| {
                (["copy", "auto"].contains(&actor.way.engine)
                    || actor.way.engine == "full" && is_short)
                    && actor.way.gpu.is_none_or(|gpu| gpu == index)
            };
            for actor in self.cast.iter().filter(keeps) {
                here.by_pid.extend(actor.processes.iter().map(|one| (one.pid.as_raw(), context)));
            }
            let holders = self.world.gpu().holders(self.world.dir(), index)?;
            found.extend(vram::leaks(&holders, &here));
        }
        Ok(found)
    }

    /// Returns the containers that needed a manual offload since the last call, each with the
    /// reason.
    pub fn take_stayed(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.stayed)
    }

    fn census(&self) -> Result<LeakCheck> {
        let ballast: Vec<i32> = self.ballast.iter().map(|(_, pid)| *pid).collect();
        LeakCheck::take(&self.world, &self.cast, &ballast)
    }

    fn mib(&self, role: usize) -> u64 {
        match self.world.gpu() {
            _ if TWINS.contains(&role) => TWIN_MIB,
            Gpu::Real => 128,
            Gpu::Simulated { .. } => 20,
        }
    }

    /// Whether the twins (two containers with equal contents) share one copy of their contents.
    #[must_use]
    pub fn is_together(&self) -> bool {
        let sealed = |role: &usize| {
            let process = self.cast.get(*role)?.processes.first()?;
            processes::sealed_files(process.pid.as_raw()).ok().filter(|files| !files.is_empty())
        };
        let [one, other] = TWINS.each_ref().map(sealed);
        one.is_some() && one == other
    }

    /// Restores and offloads the twins until they share contents, at most [`TURNS`] times. Two
    /// cases prevent sharing: a twin was offloaded without a copier, or one twin has changed its
    /// memory more often than the other twin.
    ///
    /// # Errors
    /// If a twin is not restored or not offloaded.
    pub fn bring_together(&mut self) -> Result<()> {
        for _ in 0..TURNS {
            if self.is_soon_together() {
                return Ok(());
            }
            let mut most = 0;
            for role in TWINS.into_iter().cycle().take(2 * TWINS.len()) {
                let twin = self.cast[role]
                    .processes
                    .first_mut()
                    .context("the container has no process")?;
                for _ in twin.touches..most {
                    twin.ask("touch")?;
                }
                twin.ask("verify")?;
                match twin.settle(Instant::now() + self.setup.patience()) {
                    Verdict::Well => most = twin.touches,
                    verdict => bail!("a twin is not restored: {verdict:?}"),
                }
                // VRAM does not suffice for both twins and a copier. Each twin is therefore
                // offloaded before the other twin is restored.
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

    /// Offloads all containers, then starts the container with this index in the plan.
    ///
    /// # Errors
    /// When the container does not start.
    pub fn start(&mut self, role: usize) -> Result<ChaosContainer> {
        self.rest()?;
        self.started += 1;
        let id = format!("c{role}-{}", self.started);
        let processes = WORKLOADS.get(role).copied().unwrap_or(1);
        let turn = usize::try_from(self.started).unwrap_or(0);
        // Shared contents are charged to the copier's cgroup. In `Squeezed`, sharing would
        // therefore reduce the memory shortage that this setup must cause.
        let shares =
            TWINS.contains(&role) && self.setup != Setup::Squeezed && !self.setup.uses_host_pool();
        let squeezed = self.setup == Setup::Squeezed;
        let of_twins = if squeezed { Way::DRIVER.engine } else { Way::FAST.engine };
        let pooled = self.setup.uses_host_pool();
        let fits = |way: &Way| {
            // Twins can share contents only with the engine `full`, because only this engine
            // registers memory with the copier. If host memory is short, the twins use the engine
            // `checkpoint`, which frees all host memory at each restore.
            (!TWINS.contains(&role) || way.engine == of_twins || pooled)
                // Retained copies and prefaulted memory reduce the host memory for other offloads.
                && (self.setup != Setup::Squeezed || !(way.keeps || way.prepares))
                // Containers that are prefaulted do not use the host pool.
                && !(pooled && way.prepares)
        };
        let ways: Vec<Way> = WAYS.into_iter().filter(fits).collect();
        let gpu = (self.gpus == 2).then(|| usize::from(!TWINS.contains(&role)));
        let way = Way { shares, gpu, ..ways[(role + turn) % ways.len()] };
        ChaosContainer::start(&self.world, &id, processes, self.mib(role), way)
            .with_context(|| format!("cannot start {id}"))
    }

    /// Reads all outstanding replies and verifies the contents of each process. Returns a finding
    /// for each failure.
    pub fn verify(&mut self, round: u64, verified: &mut u64) -> Vec<Finding> {
        let deadline = Instant::now() + self.setup.patience();
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

    /// Waits until the containers that a fault was meant to end have ended. Starts a new container
    /// in place of each.
    ///
    /// # Errors
    /// When a container does not end, or its replacement does not start.
    pub fn replace(&mut self) -> Result<()> {
        for role in 0..self.cast.len() {
            if self.cast[role].is_whole() {
                continue;
            }
            let doomed: Vec<_> =
                self.cast[role].processes.iter().filter(|p| p.doomed).map(|p| p.pid).collect();
            for pid in doomed {
                until(&format!("process {pid} to end as requested"), || {
                    Ok(super::container::has_ended(pid).then_some(()))
                })?;
            }
            fault::remove(&self.world, &mut self.cast[role])?;
            self.cast[role] = self.start(role)?;
        }
        Ok(())
    }

    /// Offloads all containers. Waits until they hold no VRAM except the contexts that the engines
    /// `copy` and `auto` keep.
    ///
    /// # Errors
    /// If a container is not offloaded.
    pub fn rest(&mut self) -> Result<()> {
        let (mut last, mut stayed) = (String::new(), BTreeSet::new());
        let asked = Instant::now();
        let patience = self.setup.automatic() + self.setup.patience();
        let rested = until_within(patience, "all containers to be offloaded", || {
            let Ok(node) = self.world.cli().ps_now() else {
                // The command found no controller. If there are no containers, no controller is
                // needed. Otherwise a controller is starting.
                return Ok((self.cast.is_empty()).then_some(()));
            };
            let staying: Vec<_> = node
                .containers
                .iter()
                .filter(|row| row.state != "Offloaded" && !row.id.starts_with("ballast"))
                .filter(|row| row.state != "Unregistered")
                .filter(|row| !self.may_stay(row))
                .collect();
            let stays = |row: &&ContainerRow| self.may_stay(row);
            let resident: BTreeSet<&str> =
                node.containers.iter().filter(stays).map(|row| row.id.as_str()).collect();
            last = staying
                .iter()
                .map(|row| format!("{}: {} ({}) ", row.id, row.state, row.reason))
                .collect();
            for row in &staying {
                let is_resident = matches!(row.state.as_str(), "Active" | "Idle");
                if is_resident && asked.elapsed() > self.setup.automatic() {
                    // The failed offload is a finding. The round continues, because it may show
                    // further findings.
                    let why = format!("{} ({})", row.state, row.reason);
                    stayed.insert(format!("{} was not offloaded automatically: {why}", row.id));
                    let _ = self.world.cli().output(&["offload", &row.id, "-o", "json"])?;
                }
            }
            if !staying.is_empty() {
                return Ok(None);
            }
            let held = self.held(&resident)?;
            last = held.join("; ");
            Ok(held.is_empty().then_some(()))
        });
        self.stayed.append(&mut stayed);
        rested.with_context(|| format!("last seen: {last}"))
    }

    /// Compares the numbers of processes, files and mounts with those of the new environment.
    /// Counts again until there is no difference or [`SETTLED`] has passed. Returns a description
    /// of each difference.
    ///
    /// # Errors
    /// This function returns no error. If something cannot be counted, the result describes this.
    pub fn leaks(&self) -> Result<Vec<String>> {
        let Some(first) = &self.quiet else { return Ok(Vec::new()) };
        let deadline = Instant::now() + SETTLED;
        loop {
            let found = match self.census() {
                Ok(now) => self.differences(&now, first),
                Err(error) => vec![format!("{error:#}")],
            };
            if found.is_empty() || Instant::now() > deadline {
                return Ok(found);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn differences(&self, now: &LeakCheck, first: &LeakCheck) -> Vec<String> {
        let mut found = now.differences(first);
        // Each offloaded container has a journal record. In `Squeezed` not all containers can be
        // offloaded, so the number of records can differ.
        found.retain(|text| self.setup != Setup::Squeezed || !text.starts_with("journal records"));
        found
    }

    /// Starts a thread that measures the time until the next controller replies to a command. Call
    /// this function before the controller is killed.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn time_return(&mut self) -> Result<()> {
        let Some(old) = self.world.controller()? else { return Ok(()) };
        let cli = self.world.cli().clone();
        self.returns.push(std::thread::spawn(move || {
            let began = Instant::now();
            while began.elapsed() < SETTLED {
                let node = cli.ps_now().ok();
                if node.is_some_and(|node| node.controller_pid != old.pid.as_raw()) {
                    return Some(began.elapsed());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            None
        }));
        Ok(())
    }

    /// Returns the longest time from the kill of a controller to the reply of the next controller,
    /// in milliseconds. Only kills that [`ChaosEnv::time_return`] has measured since the last call
    /// of this function count. The result is 0 if there was no such kill.
    ///
    /// # Errors
    /// When no controller replies although a container needs one.
    pub fn longest_return_ms(&mut self) -> Result<u64> {
        let mut longest_ms = 0;
        let needed = self.cast.iter().any(|actor| !actor.doomed);
        for thread in self.returns.drain(..) {
            match thread.join() {
                Ok(Some(after)) => {
                    longest_ms =
                        longest_ms.max(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
                }
                Ok(None) if !needed => {}
                Ok(None) => bail!(
                    "no other controller replied within {} s after the kill",
                    SETTLED.as_secs()
                ),
                Err(_) => bail!("the thread that waits for the next controller panicked"),
            }
        }
        Ok(longest_ms)
    }
}
