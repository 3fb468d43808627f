//! What the agent remembers of its last attempt to install Affinode.

use super::host::{self, HostError};

/// The last planned installation, and its outcome.
#[derive(Debug, Default)]
pub struct LastInstall {
    /// Whether the node keeps its label although the installation may fail, because pods of the
    /// runtime run and the installation restarts the kubelet.
    pub label_kept: bool,
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

    /// Records that the installation failed with this error, which has the text `why`.
    pub fn failed(&mut self, error: &HostError, why: &str) {
        if host::is_overwritten(error) {
            self.overwritten = Some((self.plan.clone(), why.to_owned()));
        }
    }
}
