//! Reads the configuration: `/etc/affinode/config.toml`, then `conf.d/*.toml` next to it in order
//! of name, then environment variables `AFFINODE_<SECTION>__<KEY>`. A later source overrides an
//! earlier source, value by value. An error names the unknown key or invalid value, and its source.

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
    policy::{Policies, PolicySection, duration_ms},
};
use affinode_proto::installation::InstallationPaths;
use figment::{
    Figment, Source,
    providers::{Env, Format, Toml},
};
use serde::{Deserialize, Deserializer};

pub use engine::{oci_runtime_of, start_settings_of};
pub use kubernetes::KubernetesSection;
pub use reload::ReloadedConfig;
pub use sections::{
    CopierSection, DiskFolder, DriverSection, LogFormat, LogSection, MemorySection, NvmlSection,
    TimingSection,
};
pub use services::{
    ControlSection, HistorySection, HttpActions, HttpAuth, HttpSection, JobsSection, ListenAddress,
    OciSection, ReportSection,
};
pub use set::{SetError, set};
use whole_numbers::WholeNumbers;

/// The whole configuration of the controller. Every key has a default.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Section `[policy]`: when containers are offloaded.
    pub policy: PolicySection,
    /// Section `[timing]`: intervals and deadlines of the controller.
    pub timing: TimingSection,
    /// Section `[memory]`: limits of host memory.
    pub memory: MemorySection,
    /// Section `[driver]`: where the NVIDIA driver is installed.
    pub driver: DriverSection,
    /// Section `[nvml]`: the location of NVML's library.
    pub nvml: NvmlSection,
    /// Section `[copier]`: copiers, the processes that copy GPU memory for other processes.
    pub copier: CopierSection,
    /// Section `[log]`: level and format of the log.
    pub log: LogSection,
    /// Section `[http]`: dashboard, HTTP API and metrics.
    pub http: HttpSection,
    /// Section `[control]`: access of users other than root to the command line.
    pub control: ControlSection,
    /// Section `[history]`: the history of containers that is stored on disk.
    pub history: HistorySection,
    /// Section `[report]`: prices in usage reports.
    pub report: ReportSection,
    /// Section `[jobs]`: programs that users run without a container.
    pub jobs: JobsSection,
    /// Section `[oci]`: the OCI runtime that `affinode-runtime` runs.
    pub oci: OciSection,
    /// For each key of `[policy]` that is set, the file or environment variable that set it.
    #[serde(skip)]
    pub origins: BTreeMap<String, String>,
}

/// Reason why the configuration was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A key is unknown or a value is invalid. The text names the key, its source and the accepted
    /// values.
    #[error("configuration: {0}")]
    Bad(String),
    /// The folder `conf.d` of additional configuration files cannot be listed.
    #[error("configuration: cannot list {path}")]
    List {
        /// Path of the folder that cannot be listed.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
}

impl Config {
    /// Returns the path of this installation's configuration file, by default
    /// `/etc/affinode/config.toml`.
    #[must_use]
    pub fn path() -> PathBuf {
        InstallationPaths::own().config
    }

    /// Parses the text of one configuration file. The files in `conf.d` and the environment are not
    /// read.
    ///
    /// # Errors
    /// [`ConfigError`]: a key is unknown, or a value is invalid.
    pub fn from_toml(text: &str) -> Result<Config, ConfigError> {
        Config::extract(&Figment::from(WholeNumbers(Toml::string(text))))
    }

    /// Reads the configuration file, the files in `conf.d` next to it, and the environment. If the
    /// configuration file does not exist, the defaults apply.
    ///
    /// # Errors
    /// [`ConfigError`]: a key is unknown, a value is invalid, or the drop-ins cannot be listed.
    pub fn load(file: &Path) -> Result<Config, ConfigError> {
        Config::load_with(file, None)
    }

    /// Reads the configuration like [`Config::load`], but uses another text in place of one of the
    /// files in `conf.d`.
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
            return Err(ConfigError::Bad(
                "timing.sample_interval: out of range; accepted: 10ms to 60s".into(),
            ));
        }
        if self.timing.close_deadline > 60_000 {
            return Err(ConfigError::Bad(
                "timing.close_deadline: out of range; accepted: 1ms to 60s".into(),
            ));
        }
        if self.timing.lock_timeout > 600_000 {
            return Err(ConfigError::Bad(
                "timing.lock_timeout: out of range; accepted: 1ms to 10m".into(),
            ));
        }
        self.memory.check()?;
        self.http.check()?;
        self.history.check()?;
        self.report.check()?;
        Ok(self)
    }

    /// Returns the part of the configuration that the core (the module that decides about moves)
    /// uses.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let ms = |value: Millis| u32::try_from(value).unwrap_or(u32::MAX);
        Settings {
            copiers: self.copier.enabled,
            disk: self.memory.disk().is_some(),
            policies: Policies {
                node: self.policy.policy(),
                origins: self.origins.clone(),
                rules: self.policy.namespace.clone(),
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

/// Returns the file or environment variable that set the key `name` of `[policy]`.
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

/// Lists the files `conf.d/*.toml` next to the configuration file, in order of name.
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

#[cfg(test)]
mod tests {
    use affinode_core::policy::Mode;

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
        assert_eq!(settings.policies.before_annotations("ml").idle_timeout_ms, 3_600_000);
        let prepare = |of: &str| settings.policies.before_annotations(of).prefault;
        assert_eq!((prepare("ml"), prepare("other")), (false, true));
        let dedup = |of: &str| settings.policies.before_annotations(of).dedup;
        assert_eq!((dedup("ml"), dedup("other")), (false, true));
    }

    #[test]
    fn disk_needs_a_folder() {
        assert!(!load("[memory]\ndisk_max_mib = 3\n").unwrap().settings().disk);
        let config = load(
            "[policy]\ndisk_after = \"0\"\n[memory]\ndisk_folder = \"/a\"\ndisk_max_mib = 3\n",
        )
        .unwrap();
        assert!(config.settings().disk);
        let folder = DiskFolder { path: "/a".into(), max_bytes: 3 << 20 };
        assert_eq!(config.memory.disk(), Some(folder));
        assert_eq!(config.policy.policy().disk_after_ms, 0);
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
        let policy = config.policy.policy();
        assert_eq!((policy.mode, policy.priority), (Mode::Manual, 3));
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
            ("[policy]\nminimum_vram_mib = -1\n", "a number of MiB, up to 1048576"),
            ("[policy]\npriority = 1001\n", "-1000 to 1000"),
            ("[policy]\npriority = 4294967297\n", "-1000 to 1000"),
            ("[policy\n", "TOML"),
            ("[policy]\ndisk_after = \"0s\"\n", "or 0 for never"),
            ("[memory]\ndisk_folder = \"disk\"\n", "memory.disk_folder: not an absolute path"),
            ("[memory]\ndisk_folder = \"/a\"\ndisk_max_mib = 0\n", "memory.disk_max_mib"),
            ("[memory]\ndisk_max_mib = 1073741825\n", "memory.disk_max_mib"),
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
