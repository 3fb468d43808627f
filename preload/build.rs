//! Build script of the preload library: links the product without libc or any other library.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if !is_product() {
        return;
    }
    for argument in [
        // Link neither libc nor start files, because the library must load into any process.
        "-nostdlib",
        "-nostartfiles",
        // The library runs a thread and gives out addresses of its functions, so it must never be
        // unmapped.
        "-Wl,-z,nodelete",
        // The loader makes all relocations at load, so it makes none inside a signal handler.
        "-Wl,-z,now",
        "-Wl,-soname,libaffinode_preload.so",
        // Write both kinds of hash table, because each loader reads at least one of them.
        "-Wl,--hash-style=both",
    ] {
        println!("cargo::rustc-link-arg={argument}");
    }
}

/// Whether this crate is built in the profile `preload`, the only profile in which the product is
/// linked. A build script can recognise the profile only by its folder:
/// `<target>/<profile>/build/<package>/out`.
fn is_product() -> bool {
    std::env::var("OUT_DIR").is_ok_and(|out| {
        Path::new(&out).ancestors().nth(3).is_some_and(|folder| folder.ends_with("preload"))
    })
}
