//! Podman of the machine's distribution, for the tests of `affinode-runtime`. It has no daemon, so it
//! is installed as it is.

use crate::{output, packages};

/// Programs of the packages. runc is needed by every test.
const NEEDED: [(&str, &str); 3] = [("podman", "podman"), ("conmon", "conmon"), ("crun", "crun")];

/// Installs Podman if it is missing. If this machine cannot have it, prints the reason; the tests
/// that need it are then recorded as skipped.
pub fn prepare() {
    if let Err(error) = packages::install(&NEEDED) {
        output::note(&format!("no Podman: {error:#}"));
    }
}
