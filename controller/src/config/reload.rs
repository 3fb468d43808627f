//! Applies a configuration that was read again while the controller runs. Some parts apply
//! immediately. The other parts apply when the controller starts next, and their names are
//! returned.

use super::Config;

/// Result of applying a changed configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadedConfig {
    /// Whether the new configuration changes a value that applies immediately.
    pub changed: bool,
    /// Names of changed sections or keys that apply only when the controller starts next.
    pub waits: Vec<&'static str>,
}

impl Config {
    /// Applies those changes of `read` that can apply immediately. All other values stay as they
    /// were when this controller started.
    pub fn take(&mut self, mut read: Config) -> ReloadedConfig {
        let mut waits = Vec::new();
        macro_rules! keep {
            ($($name:literal $($field:ident).+),*) => { $(
                if self.$($field).+ != read.$($field).+ {
                    waits.push($name);
                    read.$($field).+ = self.$($field).+.clone();
                }
            )* };
        }
        keep!(
            "memory" memory, "driver" driver, "nvml" nvml, "copier" copier, "log" log, "http" http, "control" control, "history" history,
            "report" report, "jobs.enabled" jobs.enabled
        );
        let changed = *self != read;
        *self = read;
        ReloadedConfig { changed, waits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HttpActions;

    #[test]
    fn a_reload_names_what_needs_a_restart() {
        let mut config = Config::default();
        let mut read = Config::default();
        read.policy.idle_timeout_ms.0 = 1;
        read.http.actions = HttpActions::Off;
        read.jobs.enabled = !read.jobs.enabled;
        read.jobs.users.push("ana".into());
        let taken = config.take(read.clone());
        assert_eq!(taken, ReloadedConfig { changed: true, waits: vec!["http", "jobs.enabled"] });
        assert_eq!((config.policy.idle_timeout_ms.0, config.jobs.users.len()), (1, 1));
        assert!(
            config.http == Config::default().http
                && config.jobs.enabled == Config::default().jobs.enabled
        );
        assert_eq!(config.take(read).waits, ["http", "jobs.enabled"], "still");
        let same = config.clone();
        assert_eq!(config.take(same), ReloadedConfig::default());
    }
}
