//! Builds the .rpm package without rpm's own tools.

use anyhow::Result;
use rpm::{BuildConfig, CompressionWithLevel, Dependency, FileOptions, PackageBuilder};

use super::{
    About,
    deb::{AFTER, BEFORE_REMOVAL},
    files::HOME,
    tree::{Node, Tree},
};

/// Folders that belong only to Affinode, so the package owns them.
const OWN: [&str; 3] = [HOME, "/usr/share/affinode", "/usr/share/doc/affinode"];

pub fn pack(about: &About, files: &Tree) -> Result<Vec<u8>> {
    let summary = "Lets containers share GPUs by offloading idle GPU memory";
    let version = about.package_version();
    let mut builder = PackageBuilder::new("affinode", &version, "Apache-2.0", "x86_64", summary);
    let config = BuildConfig::v4()
        .source_date(about.epoch_seconds)
        .compression(CompressionWithLevel::Gzip(9));
    builder
        .using_config(config)
        .release("1")
        .build_host("localhost")
        .description(
            "A containerd runtime shim that moves the GPU memory of idle containers to host memory \
             and restores it at the next CUDA call. The package does not change the node's \
             configuration: affinode install registers the runtime, affinode uninstall removes it.",
        )
        .requires(Dependency::any(format!("libc.so.6(GLIBC_{})(64bit)", about.glibc)))
        .requires(Dependency::any("libgcc_s.so.1()(64bit)"))
        .recommends(Dependency::any("containerd"))
        .post_install_script(AFTER)
        .pre_uninstall_script(BEFORE_REMOVAL);
    for folder in files.folders() {
        if OWN.iter().any(|own| folder.starts_with(own)) {
            let folder = FileOptions::dir(folder.to_string_lossy());
            builder.with_dir_entry(folder.permissions(0o755))?;
        }
    }
    for (path, node) in files.iter() {
        let path = path.to_string_lossy();
        match node {
            Node::File { content, mode } => {
                let options = FileOptions::new(&*path).permissions(*mode);
                let options = match path.split('/').nth(3) {
                    Some("doc" | "man") => options.doc(),
                    _ => options,
                };
                builder.with_file_contents(content.clone(), options)?;
            }
            Node::Link(target) => {
                let link = FileOptions::symlink(&*path, target.to_string_lossy());
                builder.with_symlink(link)?;
            }
        }
    }
    let mut bytes = Vec::new();
    builder.build()?.write(&mut bytes)?;
    Ok(bytes)
}
