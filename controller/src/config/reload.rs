//! What of a configuration that is read again holds at once, and what waits.

use super::Config;

/// What became of a configuration that was read again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadedConfig {
    /// Something is otherwise from now on.
    pub changed: bool,
    /// Sections, or values of one, that are otherwise in the files and hold from the controller's
    /// next start.
    pub waits: Vec<&'static str>,
}

impl Config {
    /// Takes what holds at once from the configuration as it was just read. The rest stays as
    /// this controller was started with.
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
            "memory" memory, "nvml" nvml, "copier" copier, "log" log, "http" http, "history" history,
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

    #[test]
    fn what_waits_is_named_until_the_next_start_and_the_rest_holds() {
        let mut config = Config::default();
        let mut read = Config::default();
        read.policy.idle_timeout = 1;
        read.http.actions = false;
        read.jobs.enabled = !read.jobs.enabled;
        read.jobs.users.push("ana".into());
        let taken = config.take(read.clone());
        assert_eq!(taken, ReloadedConfig { changed: true, waits: vec!["http", "jobs.enabled"] });
        assert_eq!((config.policy.idle_timeout, config.jobs.users.len()), (1, 1));
        assert!(config.http.actions && config.jobs.enabled == Config::default().jobs.enabled);
        assert_eq!(config.take(read).waits, ["http", "jobs.enabled"], "still");
        let same = config.clone();
        assert_eq!(config.take(same), ReloadedConfig::default());
    }
}
