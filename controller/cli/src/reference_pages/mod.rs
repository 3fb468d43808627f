//! Collects facts from the code for the reference pages in `docs/`. `affinode reference` prints the
//! facts as JSON, and `cargo xtask docs` writes the pages from them.

pub mod annotations;
pub mod config;
