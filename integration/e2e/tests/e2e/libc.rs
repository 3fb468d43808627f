//! Tests with images that contain other C libraries. Affinode's library either works in them or has
//! no effect.

use std::{path::Path, process::Command};

use affinode_e2e::{
    artifacts::Artifacts,
    container::Spec,
    containerd,
    image::{Archive, Layer},
    testbed::{Testbed, TestbedConfig},
};
use anyhow::{Result, ensure};
use serde_json::json;

const OLD: &str = "localhost/affinode/old-glibc:1";
const MUSL: &str = "localhost/affinode/musl:1";

/// Imports an image under this name. The image consists of this layer.
pub fn import(world: &Testbed, name: &str, layer: &[u8]) -> Result<()> {
    let mut archive = Archive::default();
    archive.image(name, layer, &json!({"Env": ["PATH=/usr/bin:/bin"]}))?;
    let file = world.dir().join("other.tar");
    archive.write(&file)?;
    world.containerd().import(world.keeper(), "default", &file)
}

/// Adds every file below `folder` of the root `root` to the layer, under the same path.
fn add_tree(layer: &mut Layer, root: &Path, folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let inside = Path::new("/").join(path.strip_prefix(root)?);
        if path.is_symlink() {
            layer.link(&inside, &std::fs::read_link(&path)?)?;
        } else if path.is_dir() {
            add_tree(layer, root, &path)?;
        } else {
            layer.copy(&path, &inside)?;
        }
    }
    Ok(())
}

/// Checks that Affinode's library loads in an image with the programs and the C library of an older
/// Debian.
#[test]
fn an_old_glibc_loads_it() -> Result<()> {
    let tree = Artifacts::find()?.cache_dir().join("libc-old");
    if !tree.is_dir() {
        affinode_test_notes::skip("old-glibc", "no older C library on this machine");
        return Ok(());
    }
    let world = TestbedConfig::default().world()?;
    let mut layer = Layer::base()?;
    for folder in ["bin", "lib", "lib64"] {
        add_tree(&mut layer, &tree, &tree.join(folder))?;
    }
    import(&world, OLD, &layer.finish()?)?;
    let program = ["/bin/dash", "-c", "echo works; cat /proc/self/maps"];
    let output = Spec::gpu("old", &program).image(OLD).command(&world, &["--rm"])?.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {complaints}", output.status);
    assert_eq!(complaints, "", "the loader printed a message");
    assert!(said.starts_with("works\n"), "{said}");
    assert!(said.contains("libc-2.31.so"), "the program does not use the old C library: {said}");
    assert!(said.contains("affinode_preload"), "{said}");
    Ok(())
}

/// Runs a program in an image with musl, without and with Affinode's library. musl ignores
/// /etc/ld.so.preload, so the program must run without the library. If LD_PRELOAD names the
/// library, musl must load it, and the program must still work.
#[test]
fn musl_runs_with_and_without_it() -> Result<()> {
    let world = TestbedConfig::default().world()?;
    let program = world.dir().join("hello");
    let source = world.dir().join("hello.c");
    std::fs::write(
        &source,
        "#include <stdio.h>\nint main(void)\n{\n    puts(\"works\");\n    char line[512];\n    FILE *maps = fopen(\"/proc/self/maps\", \"r\");\n    while (maps && fgets(line, sizeof line, maps))\n        fputs(line, stdout);\n    return 0;\n}\n",
    )?;
    containerd::run(Command::new("musl-gcc").arg("-o").arg(&program).arg(&source))?;
    let loader = Path::new("/lib/ld-musl-x86_64.so.1");
    ensure!(loader.exists(), "musl is not installed: run `cargo xtask deps`");
    let mut layer = Layer::base()?;
    layer.copy(loader, loader)?;
    layer.copy(&program, Path::new("/bin/hello"))?;
    import(&world, MUSL, &layer.finish()?)?;

    let spec = || Spec::gpu("musl", &["/bin/hello"]).image(MUSL);
    let said = spec().run(&world)?;
    assert!(said.starts_with("works\n") && !said.contains("affinode_preload"), "{said}");
    let said = spec().env("LD_PRELOAD", "/.affinode/lib/libaffinode_preload.so").run(&world)?;
    assert!(said.starts_with("works\n"), "{said}");
    assert!(said.contains("affinode_preload"), "{said}");
    Ok(())
}
