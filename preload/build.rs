//! How the product is linked: against nothing at all.

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
        // It has a thread and hands out addresses of its code: it can never be unmapped.
        "-Wl,-z,nodelete",
        // All relocations at load, none in the middle of a signal handler.
        "-Wl,-z,now",
        "-Wl,-soname,libaffinode_preload.so",
        // The loaders of all times read one of the two.
        "-Wl,--hash-style=both",
    ] {
        println!("cargo::rustc-link-arg={argument}");
    }
}

/// Whether the profile is `preload`, in which nothing but the product is linked. Cargo
/// tells a build script no more of it than the folder: `<target>/<profile>/build/<package>/out`.
fn is_product() -> bool {
    std::env::var("OUT_DIR").is_ok_and(|out| {
        Path::new(&out).ancestors().nth(3).is_some_and(|folder| folder.ends_with("preload"))
    })
}
