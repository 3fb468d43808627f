//! Sets how the product is linked: without any library.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if !is_product() {
        return;
    }
    for argument in [
        // No libc, no start files: the library must load into any process.
        "-nostdlib",
        "-nostartfiles",
        // The library has a thread and hands out addresses of its code: it must never be unmapped.
        "-Wl,-z,nodelete",
        // All relocations are made at load, none inside a signal handler.
        "-Wl,-z,now",
        "-Wl,-soname,libaffinode_preload.so",
        // Each loader reads at least one of the two hash tables.
        "-Wl,--hash-style=both",
    ] {
        println!("cargo::rustc-link-arg={argument}");
    }
}

/// Whether the profile is `preload`, the only one in which the product is linked. A build script
/// can tell the profile only by its folder: `<target>/<profile>/build/<package>/out`.
fn is_product() -> bool {
    std::env::var("OUT_DIR").is_ok_and(|out| {
        Path::new(&out).ancestors().nth(3).is_some_and(|folder| folder.ends_with("preload"))
    })
}
