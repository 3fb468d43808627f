//! Build script that generates the code of one containerd message, which the crate
//! containerd-shim-protos lacks.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=runtimeoptions.proto");
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .input("runtimeoptions.proto")
        .include(".")
        .rust_protobuf()
        .customize(ttrpc_codegen::Customize { gen_mod: false, ..Default::default() })
        .rust_protobuf_customize(ttrpc_codegen::ProtobufCustomize::default())
        .run()?;
    // Inner attributes are not allowed in an included module, so they are removed.
    let path = out.join("runtimeoptions.rs");
    let text = std::fs::read_to_string(&path)?;
    let kept: Vec<&str> =
        text.lines().filter(|l| !l.starts_with("#![") && !l.starts_with("//!")).collect();
    std::fs::write(&path, kept.join("\n"))?;
    Ok(())
}
