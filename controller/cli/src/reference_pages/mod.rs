//! Facts from the code for the reference pages in `docs/`. `affinode reference` prints them as
//! JSON, and `cargo xtask docs` writes the pages.

pub mod annotations;
pub mod config;
