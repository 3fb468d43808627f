//! Build script of the simulated libcuda. It sets the library's name (soname) and other link
//! options, so that programs can load the built file in place of the driver's `libcuda.so.1`.

use std::path::PathBuf;
use std::{env, fs};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // cuGetProcAddress must return this library's functions, even if another library exports the
    // same names first.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // std is linked to libgcc_s.so.1, which a container may lack. This linker script replaces that
    // library, and takes the unwinder from the compiler's static library.
    let folder = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(folder.join("libgcc_s.so"), "INPUT ( -lgcc_eh -lgcc )\n")?;
    println!("cargo:rustc-link-search=native={}", folder.display());
    Ok(())
}
