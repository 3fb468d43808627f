//! What the agent remembers of its last attempt to install Affinode.

use std::time::{Duration, Instant};

use super::host::{self, HostError};

/// Time after a failed installation for which a kubelet that it restarted may still be starting.
const KUBELET_START: Duration = Duration::from_secs(300);

/// The last planned installation, and its outcome.
#[derive(Debug, Default)]
pub struct LastInstall {
    /// Whether the node has its label during the installation, because pods of the runtime run and
    /// the installation restarts the kubelet.
    pub label_kept: bool,
    /// End of the last failed installation that may have restarted the kubelet.
    restarted: Option<Instant>,
    /// Steps of the last planned installation.
    plan: Vec<String>,
    /// Steps of an installation after which another program wrote containerd's file anew, and the
    /// error. The same steps would restart containerd again, to no effect.
    overwritten: Option<(Vec<String>, String)>,
}

impl LastInstall {
    /// Records the steps of an installation that is about to start.
    ///
    /// # Errors
    /// The error of the last installation, if the same steps have no effect on this node.
    pub fn plan(&mut self, steps: &[String]) -> Result<(), HostError> {
        if let Some((_, why)) = self.overwritten.as_ref().filter(|(lost, _)| lost == steps) {
            return Err(HostError::Refused(why.clone()));
        }
        self.plan = steps.to_vec();
        Ok(())
    }

    /// Records the end of an installation at the time `now`.
    pub fn end(&mut self, result: Result<(), &HostError>, now: Instant) {
        match result {
            Ok(()) => self.restarted = None,
            Err(error) if self.label_kept && !host::has_restarted_nothing(error) => {
                self.restarted = Some(now);
            }
            Err(_) => {}
        }
        self.label_kept = false;
    }

    /// Returns whether a kubelet that the last installation restarted may still be starting, so
    /// that the node needs its label for the pods that run.
    #[must_use]
    pub fn keeps_label(&self, now: Instant) -> bool {
        self.restarted.is_some_and(|end| now.saturating_duration_since(end) < KUBELET_START)
    }

    /// Records that the installation failed with this error, which has the text `why`.
    pub fn failed(&mut self, error: &HostError, why: &str) {
        if host::is_overwritten(error) {
            self.overwritten = Some((self.plan.clone(), why.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_is_kept_only_while_a_kubelet_starts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let refused = |why: &str| HostError::Refused(why.to_owned());
        let mut last = LastInstall::default();
        assert!(!last.keeps_label(at(0)));
        let mut end = |label_kept, error: &HostError, seconds| {
            last.label_kept = label_kept;
            last.end(Err(error), at(seconds));
            [0, 299, 300].map(|after| last.keeps_label(at(seconds + after)))
        };
        let unwritten = refused("containerd was not restarted, because an installed file ...");
        assert_eq!(end(true, &unwritten, 0), [false; 3]);
        assert_eq!(end(false, &refused("systemctl restart containerd failed"), 0), [false; 3]);
        assert_eq!(end(true, &refused("systemctl restart k3s failed"), 0), [true, true, false]);
        assert_eq!(end(true, &HostError::Late("install"), 200), [true, true, false]);
        // The kubelet of the earlier attempt may still be starting.
        assert_eq!(end(true, &unwritten, 300), [true, false, false]);
        last.end(Ok(()), at(310));
        assert!(!last.keeps_label(at(310)));
    }
}
