//! Fuzz targets for every function that reads bytes from another program. Each target is a function
//! that panics when it finds a fault.
//!
//! - `cargo test -p affinode-fuzz` runs each target on its corpus (`corpus/<target>`) and on random
//!   changes of the corpus. `PROPTEST_CASES` sets the number of changes.
//! - `cargo xtask fuzz --seconds 300` runs libFuzzer, guided by coverage. If an input reaches new
//!   code, the input is stored in `target/fuzz/corpus`. With `--keep`, each corpus of this crate is
//!   replaced by the smallest set of inputs with the same coverage.
//!
//! Among the crates of `integration`, only this one links the product's crates, because it tests
//! functions instead of programs.

pub mod targets;

use targets::{agent, files, image, node, shim};

/// Name and function of a fuzz target.
pub type Target = (&'static str, fn(&[u8]));

/// All fuzz targets, each with its name.
pub const TARGETS: [Target; 17] = [
    ("page", agent::page),
    ("messages", agent::messages),
    ("hostile", node::hostile),
    ("ttrpc", shim::ttrpc),
    ("start", shim::start),
    ("spec", shim::spec),
    ("preload", shim::preload),
    ("config", files::config),
    ("annotations", files::annotations),
    ("query", files::query),
    ("trace", files::trace),
    ("copier", affinode_copier::testing::play),
    ("image", image::image),
    ("options", shim::options),
    ("hint", files::hint),
    ("journal", files::journal),
    ("docker", shim::docker),
];

/// Returns the function of the fuzz target with this name.
#[must_use]
pub fn find(name: &str) -> Option<fn(&[u8])> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, run)| *run)
}
