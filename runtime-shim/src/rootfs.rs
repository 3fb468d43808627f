//! Reads files of a container's root filesystem before it is mounted.
//!
//! A Create request contains the mounts that will make the rootfs: an overlay of layers, or a bind
//! mount of one folder. The lookup finds a file as the merged tree would show it: one name at a
//! time, from the top layer down, with whiteouts, opaque folders, and symlinks resolved within the
//! tree. Each name is opened below its parent without following links, so no image can lead the
//! lookup outside of its layers.

mod layers;
mod resolve;

pub use layers::{RootfsError, RootfsLayers};
pub use resolve::ResolvedPath;
