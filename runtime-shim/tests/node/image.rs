//! Builds a root filesystem with one static program for tests, as a folder and as an image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Path of the program in the container. Its name identifies the container's processes.
pub const BOX: &str = "/bin/affinode-test-box";

const SOURCE: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void leave(int signal) { _exit(100 + signal); }
int main(int count, char **args) {
    const char *verb = count > 1 ? args[1] : "";
    if (!strcmp(verb, "echo")) {
        for (int i = 2; i < count; i++) puts(args[i]);
        return 0;
    }
    if (!strcmp(verb, "cat")) {
        char bytes[4096];
        for (int i = 2; i < count; i++) {
            FILE *file = fopen(args[i], "r");
            if (!file) { perror(args[i]); return 1; }
            fwrite(bytes, 1, fread(bytes, 1, sizeof bytes, file), stdout);
        }
        return 0;
    }
    if (!strcmp(verb, "exit")) return atoi(args[2]);
    if (!strcmp(verb, "tty")) { printf("tty %d\n", isatty(0) && isatty(1)); return 0; }
    signal(SIGTERM, leave);
    for (;;) pause();
}
"#;

/// Creates a root filesystem in a folder, with the program that gcc builds statically.
pub fn make_rootfs(root: &Path) {
    for dir in ["bin", "etc", "dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let source = root.with_extension("c");
    fs::write(&source, SOURCE).unwrap();
    let status = Command::new("gcc")
        .args(["-static", "-O1", "-o"])
        .arg(root.join(&BOX[1..]))
        .arg(&source)
        .status()
        .expect("gcc is needed to build the test's program");
    assert!(status.success());
}

/// Builds an image as an OCI archive: the folder is the first layer, then the given layers follow.
pub fn make_image(
    rootfs: &Path,
    dir: &Path,
    name: &str,
    layers: &[&[(&str, Option<&str>)]],
) -> PathBuf {
    let layout = dir.join("layout");
    let _ = fs::remove_dir_all(&layout);
    let mut folders = vec![rootfs.to_owned()];
    for (number, layer) in layers.iter().enumerate() {
        let folder = layout.join(format!("layer{number}"));
        fs::create_dir_all(&folder).unwrap();
        for (path, text) in *layer {
            let mut path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if text.is_none() {
                let hidden = path.file_name().unwrap().to_str().unwrap();
                path = path.with_file_name(format!(".wh.{hidden}"));
            }
            fs::write(&path, text.unwrap_or_default()).unwrap();
        }
        folders.push(folder);
    }
    let archive = layout.join("archive");
    let blobs = archive.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let blob = |bytes: &[u8], kind: &str| -> Value {
        let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        fs::write(blobs.join(&digest), bytes).unwrap();
        json!({"mediaType": kind, "digest": format!("sha256:{digest}"), "size": bytes.len()})
    };
    let layers: Vec<Value> = folders
        .iter()
        .map(|folder| {
            blob(&tar(folder, &layout.join("one.tar")), "application/vnd.oci.image.layer.v1.tar")
        })
        .collect();
    let ids: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": ids}
    });
    let config = blob(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
    let mut manifest = blob(manifest.to_string().as_bytes(), kind);
    manifest["annotations"] = json!({"io.containerd.image.name": name});
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(archive.join("index.json"), index.to_string()).unwrap();
    fs::write(archive.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let path = dir.join("image.tar");
    fs::write(&path, tar(&archive, &layout.join("all.tar"))).unwrap();
    path
}

fn tar(folder: &Path, to: &Path) -> Vec<u8> {
    let status = Command::new("tar")
        .args(["--numeric-owner", "--owner=0", "--group=0", "-cf"])
        .arg(to)
        .arg("-C")
        .arg(folder)
        .arg(".")
        .status()
        .expect("tar is needed to build the test's image");
    assert!(status.success());
    fs::read(to).unwrap()
}
