//! Installs Affinode on a node, and checks whether a machine is ready for it.
//!
//! | module | content |
//! | --- | --- |
//! | [`install`] | `affinode install`, `uninstall`, `status`: containerd, Docker, Podman, the unit |
//! | [`doctor`] | `affinode doctor`: checks, and how to fix what they find |
//!
//! The shim does not link this crate.

// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

pub mod doctor;
pub mod install;
mod sys;
