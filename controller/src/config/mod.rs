//! The configuration: `/etc/affinode/config.toml`, then `conf.d/*.toml` next to it in order of
//! name, then environment variables `AFFINODE_<SECTION>__<KEY>`. A later source overrides an
//! earlier one, value by value. An error names the unknown key or invalid value, and its source.

mod engine;
mod error;
mod kubernetes;
mod reload;
mod sections;
mod services;
mod set;
mod whole_numbers;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use affinode_core::{
    Millis, Settings, explain,
    plan::OrderDeadlines,
    policy::{
        Engine, KeepAlive, MAX_VRAM_MIB, Mode, OnOom, Policies, Policy, Restore, Rule, WakeOn,
        duration_ms,
    },
    victims::VictimRule,
    window::Window,
};
use affinode_proto::installation::InstallationPaths;
use figment::{
    Figment, Source,
    providers::{Env, Format, Toml},
};
use serde::{Deserialize, Deserializer};

pub use engine::{engine_of, oci_runtime_of};
pub use kubernetes::KubernetesSection;
pub use reload::ReloadedConfig;
pub use sections::{
    CopierSection, DriverSection, LogFormat, LogSection, MemorySection, NvmlSection, TimingSection,
};
pub use services::{
    ControlSection, HistorySection, HttpActions, HttpAuth, HttpSection, JobsSection, ListenAddress,
    OciSection, ReportSection,
};
pub use set::{SetError, set};
use whole_numbers::WholeNumbers;

/// The whole configuration. Every key has a default.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Section `[policy]`: when containers are offloaded.
    pub policy: PolicySection,
    /// Section `[timing]`: intervals and deadlines.
    pub timing: TimingSection,
    /// Section `[memory]`: limits of host memory.
    pub memory: MemorySection,
    /// Section `[driver]`: where the driver is installed.
    pub driver: DriverSection,
    /// Section `[nvml]`: the library of NVML.
    pub nvml: NvmlSection,
    /// Section `[copier]`: the processes that copy memory for other processes.
    pub copier: CopierSection,
    /// Section `[log]`: level and format of the log.
    pub log: LogSection,
    /// Section `[http]`: dashboard, API and metrics.
    pub http: HttpSection,
    /// Section `[control]`: users of the command line who are not root.
    pub control: ControlSection,
    /// Section `[history]`: the history on disk.
    pub history: HistorySection,
    /// Section `[report]`: prices in reports.
    pub report: ReportSection,
    /// Section `[jobs]`: programs without a container.
    pub jobs: JobsSection,
    /// Section `[oci]`: the runtime behind `affinode-runtime`.
    pub oci: OciSection,
    /// The file or variable that set each value of `[policy]`, by key.
    #[serde(skip)]
    pub origins: BTreeMap<String, String>,
}

/// Section `[policy]`: conditions and method of offloads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicySection {
    /// Condition of an offload: auto, eager, pressure, manual or off.
    pub mode: Mode,
    /// Time without a call after which a container is idle, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub idle_timeout: Millis,
    /// Time for which a container stays resident after a restore, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub minimum_residency: Millis,
    /// Containers of higher priority are restored first.
    pub priority: i32,
    /// Time for which a container must be idle before an offload. learned: a learned time, at most
    /// idle_timeout. fixed: idle_timeout.
    pub keep_alive: KeepAlive,
    /// Cost of one wake, in milliseconds of VRAM held idle.
    #[serde(deserialize_with = "duration")]
    pub wake_cost: Millis,
    /// Whether a container is restored ahead of a call that its history makes likely.
    pub prewake: bool,
    /// Causes of a wake: only calls, or calls and connections.
    pub wake_on: WakeOn,
    /// Way in which a container is restored when its VRAM is in use: queue, immediate or
    /// by-annotation.
    pub restore: Restore,
    /// Handling of an allocation that finds no free VRAM: fail or wait.
    pub on_oom: OnOom,
    /// Maximum time for which an allocation without free VRAM is retried, in milliseconds.
    #[serde(deserialize_with = "duration")]
    pub on_oom_timeout: Millis,
    /// Way in which memory leaves the GPU: auto, copy, full, checkpoint.
    pub engine: Engine,
    /// Whether the copy in host memory is kept after a restore.
    pub retain_host_copy: bool,
    /// Whether a restore verifies the copied memory.
    pub checksum: bool,
    /// Whether identical content of offloaded containers of a namespace is stored once.
    pub dedup: bool,
    /// Whether host memory is prepared for the offload while a container is idle.
    pub prefault: bool,
    /// Whether a container may be restored on another GPU of the same model when its own is full.
    pub allow_gpu_migration: bool,
    /// Minimum VRAM of a container that is offloaded, in MiB.
    pub minimum_vram_mib: u64,
    /// Time in which idle containers may be offloaded without a waiter: always, or times of the
    /// week in UTC.
    #[serde(deserialize_with = "window")]
    pub offload_window: Window,
    /// Rule for the choice of victims: expected, lru, size-idle.
    pub victims: VictimRule,
    /// Rules for one namespace each, `[[policy.namespace]]`.
    pub namespace: Vec<NamespaceRule>,
}

/// A rule for one namespace. `None` in a field: the node's value applies.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceRule {
    /// Name of the namespace: of Kubernetes, or of containerd outside Kubernetes.
    pub name: String,
    /// Overrides the node's mode.
    pub mode: Option<Mode>,
    /// Overrides the node's idle timeout, in milliseconds.
    #[serde(default, deserialize_with = "maybe_duration")]
    pub idle_timeout: Option<Millis>,
    /// Overrides the node's minimum residency, in milliseconds.
    #[serde(default, deserialize_with = "maybe_duration")]
    pub minimum_residency: Option<Millis>,
    /// Overrides the node's priority.
    pub priority: Option<i32>,
    /// Overrides the node's keep_alive.
    pub keep_alive: Option<KeepAlive>,
    /// Overrides the node's wake cost, in milliseconds.
    #[serde(default, deserialize_with = "maybe_duration")]
    pub wake_cost: Option<Millis>,
    /// Overrides the node's prewake.
    pub prewake: Option<bool>,
    /// Overrides the node's wake_on.
    pub wake_on: Option<WakeOn>,
    /// Overrides the node's restore.
    pub restore: Option<Restore>,
    /// Overrides the node's on_oom.
    pub on_oom: Option<OnOom>,
    /// Overrides the node's on_oom_timeout, in milliseconds.
    #[serde(default, deserialize_with = "maybe_duration")]
    pub on_oom_timeout: Option<Millis>,
    /// Overrides the node's engine.
    pub engine: Option<Engine>,
    /// Overrides the node's retain_host_copy.
    pub retain_host_copy: Option<bool>,
    /// Overrides the node's checksum.
    pub checksum: Option<bool>,
    /// Overrides the node's dedup.
    pub dedup: Option<bool>,
    /// Overrides the node's prefault.
    pub prefault: Option<bool>,
    /// Overrides the node's allow_gpu_migration.
    pub allow_gpu_migration: Option<bool>,
    /// Overrides the node's minimum_vram_mib.
    pub minimum_vram_mib: Option<u64>,
    /// Overrides the node's offload_window.
    #[serde(default, deserialize_with = "maybe_window")]
    pub offload_window: Option<Window>,
}

impl Default for PolicySection {
    fn default() -> PolicySection {
        let policy = Policy::default();
        PolicySection {
            mode: policy.mode,
            idle_timeout: policy.idle_timeout_ms,
            minimum_residency: policy.minimum_residency_ms,
            priority: policy.priority,
            keep_alive: policy.keep_alive,
            wake_cost: policy.wake_cost_ms,
            prewake: policy.prewake,
            wake_on: policy.wake_on,
            restore: policy.restore,
            on_oom: policy.on_oom,
            on_oom_timeout: policy.on_oom_timeout_ms,
            engine: policy.engine,
            retain_host_copy: policy.retain_host_copy,
            checksum: policy.checksum,
            dedup: policy.dedup,
            prefault: policy.prefault,
            allow_gpu_migration: policy.allow_gpu_migration,
            minimum_vram_mib: policy.minimum_vram_bytes >> 20,
            offload_window: policy.offload_window,
            victims: VictimRule::default(),
            namespace: Vec::new(),
        }
    }
}

/// Reason why the configuration was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key is unknown or a value is invalid. The text names key, source and accepted values.
    #[error("configuration: {0}")]
    Bad(String),
    /// The folder of drop-ins cannot be listed.
    #[error("configuration: cannot list {path}")]
    List {
        /// Path of the folder.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
}

impl Config {
    /// Path of this installation's configuration file, by default `/etc/affinode/config.toml`.
    #[must_use]
    pub fn path() -> PathBuf {
        InstallationPaths::own().config
    }

    /// Parses the text of one file, without drop-ins and environment.
    ///
    /// # Errors
    /// [`ConfigError`]: an unknown key or an invalid value.
    pub fn from_toml(text: &str) -> Result<Config, ConfigError> {
        Config::extract(&Figment::from(WholeNumbers(Toml::string(text))))
    }

    /// Reads file, drop-ins and environment. If the file does not exist, its defaults apply.
    ///
    /// # Errors
    /// [`ConfigError`]: an unknown key or an invalid value, or the drop-ins cannot be listed.
    pub fn load(file: &Path) -> Result<Config, ConfigError> {
        Config::load_with(file, None)
    }

    /// Like [`Config::load`], with another text in place of one drop-in.
    fn load_with(file: &Path, replaced: Option<(&Path, &str)>) -> Result<Config, ConfigError> {
        let mut figment = Figment::new();
        if file.exists() {
            figment = figment.merge(WholeNumbers(Toml::file_exact(file)));
        }
        let mut files = drop_ins(file)?;
        if let Some((path, _)) = replaced {
            files.push(path.to_owned());
            files.sort();
            files.dedup();
        }
        for path in files {
            figment = match replaced {
                Some((other, text)) if other == path => {
                    figment.merge(WholeNumbers(Toml::string(text)))
                }
                _ => figment.merge(WholeNumbers(Toml::file_exact(path))),
            };
        }
        let env = Env::prefixed("AFFINODE_").filter(|key| key.as_str().contains("__")).split("__");
        Config::extract(&figment.merge(env))
    }

    fn extract(figment: &Figment) -> Result<Config, ConfigError> {
        let mut config: Config =
            figment.extract().map_err(|error| ConfigError::Bad(error::tell(error)))?;
        config.origins = explain::names()
            .filter_map(|name| Some((name.to_owned(), origin(figment, name)?)))
            .collect();
        config.check()
    }

    fn check(self) -> Result<Config, ConfigError> {
        if !(10..=60_000).contains(&self.timing.sample_interval) {
            return Err(ConfigError::Bad("timing.sample_interval: accepted: 10ms to 60s".into()));
        }
        if self.timing.close_deadline > 60_000 {
            return Err(ConfigError::Bad("timing.close_deadline: accepted: 1ms to 60s".into()));
        }
        if self.timing.lock_timeout > 600_000 {
            return Err(ConfigError::Bad("timing.lock_timeout: accepted: 1ms to 10m".into()));
        }
        let rules = self.policy.namespace.iter().filter_map(|rule| rule.minimum_vram_mib);
        if rules.chain([self.policy.minimum_vram_mib]).any(|mib| mib > MAX_VRAM_MIB) {
            return Err(ConfigError::Bad("minimum_vram_mib: accepted: up to 1048576".into()));
        }
        self.http.check()?;
        self.history.check()?;
        self.report.check()?;
        Ok(self)
    }

    /// The part of the configuration that the core uses.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let ms = |value: Millis| u32::try_from(value).unwrap_or(u32::MAX);
        Settings {
            copiers: self.copier.enabled,
            policies: Policies {
                node: Policy {
                    mode: self.policy.mode,
                    idle_timeout_ms: self.policy.idle_timeout,
                    minimum_residency_ms: self.policy.minimum_residency,
                    priority: self.policy.priority,
                    keep_alive: self.policy.keep_alive,
                    wake_cost_ms: self.policy.wake_cost,
                    prewake: self.policy.prewake,
                    wake_on: self.policy.wake_on,
                    restore: self.policy.restore,
                    on_oom: self.policy.on_oom,
                    on_oom_timeout_ms: self.policy.on_oom_timeout,
                    engine: self.policy.engine,
                    retain_host_copy: self.policy.retain_host_copy,
                    checksum: self.policy.checksum,
                    dedup: self.policy.dedup,
                    prefault: self.policy.prefault,
                    allow_gpu_migration: self.policy.allow_gpu_migration,
                    minimum_vram_bytes: self.policy.minimum_vram_mib << 20,
                    offload_window: self.policy.offload_window.clone(),
                },
                origins: self.origins.clone(),
                rules: self
                    .policy
                    .namespace
                    .iter()
                    .map(|rule| Rule {
                        namespace: rule.name.clone(),
                        mode: rule.mode,
                        idle_timeout_ms: rule.idle_timeout,
                        minimum_residency_ms: rule.minimum_residency,
                        priority: rule.priority,
                        keep_alive: rule.keep_alive,
                        wake_cost_ms: rule.wake_cost,
                        prewake: rule.prewake,
                        wake_on: rule.wake_on,
                        restore: rule.restore,
                        on_oom: rule.on_oom,
                        on_oom_timeout_ms: rule.on_oom_timeout,
                        engine: rule.engine,
                        retain_host_copy: rule.retain_host_copy,
                        checksum: rule.checksum,
                        dedup: rule.dedup,
                        prefault: rule.prefault,
                        allow_gpu_migration: rule.allow_gpu_migration,
                        minimum_vram_bytes: rule.minimum_vram_mib.map(|mib| mib << 20),
                        offload_window: rule.offload_window.clone(),
                    })
                    .collect(),
            },
            deadlines: OrderDeadlines {
                close_ms: ms(self.timing.close_deadline),
                lock_ms: ms(self.timing.lock_timeout),
            },
            victims: self.policy.victims,
            ..Settings::default()
        }
    }
}

/// The file or variable that set this value of `[policy]`.
fn origin(figment: &Figment, name: &str) -> Option<String> {
    let metadata = figment.find_metadata(&format!("policy.{name}"))?;
    Some(match &metadata.source {
        Some(Source::File(path)) => path.display().to_string(),
        _ if metadata.name.contains("nvironment") => {
            format!("AFFINODE_POLICY__{}", name.to_uppercase())
        }
        _ => metadata.name.to_string(),
    })
}

/// The files `conf.d/*.toml` next to the configuration file, in order of name.
fn drop_ins(file: &Path) -> Result<Vec<PathBuf>, ConfigError> {
    let Some(folder) = file.parent().map(|parent| parent.join("conf.d")) else {
        return Ok(Vec::new());
    };
    let fail = |source| ConfigError::List { path: folder.clone(), source };
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(fail(e)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Millis, D::Error> {
    let text = String::deserialize(from)?;
    duration_ms(&text).map_err(|accepted| serde::de::Error::custom(format!("{text:?}: {accepted}")))
}

fn window<'de, D: Deserializer<'de>>(from: D) -> Result<Window, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(|accepted| serde::de::Error::custom(format!("{text:?}: {accepted}")))
}

fn maybe_window<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Window>, D::Error> {
    window(from).map(Some)
}

fn maybe_duration<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Millis>, D::Error> {
    duration(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, text).unwrap();
        Config::load(&file)
    }

    #[test]
    fn no_file_gives_the_defaults() {
        assert_eq!(Config::load(Path::new("/nonexistent/config.toml")).unwrap(), Config::default());
    }

    #[test]
    fn the_sample_file_holds_the_defaults() {
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/config.toml");
        let read = Config::load(&sample).unwrap();
        assert_eq!(Config { origins: BTreeMap::new(), ..read }, Config::default());
    }

    #[test]
    fn values_and_rules_are_read() {
        let config = load("[policy]\nmode = \"pressure\"\nidle_timeout = \"90s\"\nprefault = true\ndedup = true\n[[policy.namespace]]\nname = \"ml\"\nidle_timeout = \"1h\"\nprefault = false\ndedup = false\n").unwrap();
        let settings = config.settings();
        assert_eq!(settings.policies.node.idle_timeout_ms, 90_000);
        assert_eq!(settings.policies.rules[0].idle_timeout_ms, Some(3_600_000));
        let prepare = |of: &str| settings.policies.before_annotations(of).prefault;
        assert_eq!((prepare("ml"), prepare("other")), (false, true));
        let dedup = |of: &str| settings.policies.before_annotations(of).dedup;
        assert_eq!((dedup("ml"), dedup("other")), (false, true));
    }

    #[test]
    fn a_drop_in_wins_value_by_value() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, "[policy]\nmode = \"off\"\npriority = 3\n").unwrap();
        std::fs::create_dir(folder.path().join("conf.d")).unwrap();
        std::fs::write(folder.path().join("conf.d/10.toml"), "[policy]\nmode = \"manual\"\n")
            .unwrap();
        let config = Config::load(&file).unwrap();
        assert_eq!((config.policy.mode, config.policy.priority), (Mode::Manual, 3));
        assert!(config.origins["mode"].ends_with("conf.d/10.toml"), "{:?}", config.origins);
        assert!(config.origins["priority"].ends_with("config.toml"), "{:?}", config.origins);
        assert_eq!(config.origins.get("idle_timeout"), None);
    }

    #[test]
    fn an_invalid_value_is_named() {
        for (text, named) in [
            ("[policy]\ncolour = 1\n", "colour"),
            ("[policy]\nmode = \"often\"\n", "often"),
            ("[policy]\nidle_timeout = \"soon\"\n", "soon"),
            ("[policy]\nrestore = \"now\"\n", "now"),
            ("[policy]\noffload_window = \"nights\"\n", "nights"),
            ("[policy]\nminimum_vram_mib = 9999999\n", "minimum_vram_mib"),
            ("[policy\n", "TOML"),
            ("[timing]\nsample_interval = \"1ms\"\n", "sample_interval"),
        ] {
            let error = load(text).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn an_error_names_key_file_and_values() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::create_dir(folder.path().join("conf.d")).unwrap();
        let drop_in = folder.path().join("conf.d/10.toml");
        std::fs::write(&file, "[policy]\nmode = \"often\"\n").unwrap();
        let told = || Config::load(&file).unwrap_err().to_string();
        let at = |file: &Path| format!("in {}: ", file.display());
        let words = "\"often\"; accepted: auto, eager, pressure, manual, off";
        assert_eq!(told(), format!("configuration: policy.mode {}{words}", at(&file)));
        std::fs::write(&file, "").unwrap();
        std::fs::write(&drop_in, "[log]\ncolour = true\n").unwrap();
        let words = "unknown key; accepted: level, format";
        assert_eq!(told(), format!("configuration: log.colour {}{words}", at(&drop_in)));
    }
}
