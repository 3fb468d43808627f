//! Installs Podman from the machine's distribution, for the tests of `affinode-runtime`. Podman has
//! no daemon, so its package can be installed without side effects.

use crate::{output, packages};

/// Programs that the tests need, and their packages. `runc` is not listed, because every test needs
/// it.
const NEEDED: [(&str, &str); 3] = [("podman", "podman"), ("conmon", "conmon"), ("crun", "crun")];

/// Installs Podman if it is missing. If this machine cannot have Podman, prints the reason. Tests
/// that need Podman are then recorded as skipped.
pub fn prepare() {
    if let Err(error) = packages::install(&NEEDED) {
        output::note(&format!("Podman is not available: {error:#}"));
    }
}
