//! A look into a container's root filesystem before it is mounted.
//!
//! Create carries the mounts that will make the rootfs: an overlay of layers, or
//! a bind of one folder. A file is found in them as the merged tree would show
//! it: one name at a time, from the top layer down, through whiteouts and opaque
//! folders, symlinks resolved within the tree. Each name is opened below its
//! parent without following links, so nothing outside of the layers is reached,
//! whatever an image holds.

mod layers;
mod resolve;

pub use layers::{RootfsError, RootfsLayers};
pub use resolve::ResolvedPath;
