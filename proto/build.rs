//! Generates the control API from `control.proto`, without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=control.proto");
    #[cfg(feature = "api")]
    {
        let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
        ttrpc_codegen::Codegen::new()
            .out_dir(&out)
            .input("control.proto")
            .include(".")
            .rust_protobuf()
            .customize(ttrpc_codegen::Customize {
                async_all: true,
                gen_mod: false,
                ..Default::default()
            })
            .rust_protobuf_customize(ttrpc_codegen::ProtobufCustomize::default())
            .run()?;
        // Inner attributes are not allowed in an included module, so they are removed.
        for name in ["control.rs", "control_ttrpc.rs"] {
            let path = out.join(name);
            let text = std::fs::read_to_string(&path)?;
            let kept: Vec<&str> =
                text.lines().filter(|l| !l.starts_with("#![") && !l.starts_with("//!")).collect();
            std::fs::write(&path, kept.join("\n"))?;
        }
    }
    Ok(())
}
