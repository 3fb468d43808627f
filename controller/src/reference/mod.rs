//! What the code knows about itself, for the reference pages in `docs/`: `affinode reference`
//! prints it as JSON, and `cargo xtask docs` writes the pages.

pub mod annotations;
pub mod config;
