//! `cargo xtask package`: creates the files of a release (packages and image), without a registry
//! and without a daemon.
//!
//! ```text
//!  build ──> programs ──┬──> contents of a node's package ──┬──> .deb
//!                       │                                  └──> .rpm
//!                       └──> contents of the image ────────────> OCI archive    SBOM, SHA256SUMS
//! ```
//!
//! The output depends only on the commit. File names are sorted, times are those of the commit, and
//! root owns all files. To verify this, everything is packed twice and compared.

mod build;
mod check;
mod deb;
mod files;
mod image;
mod rpm;
mod sbom;
#[cfg(test)]
mod tests;
mod tree;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::{Artifacts, target_dir, workspace_dir};
use anyhow::{Context, Result, bail};
use clap::Args;
use sha2::{Digest, Sha256};

use self::tree::Tree;
use crate::{output, sh};

/// What to pack, and where to write it.
#[derive(Args)]
pub struct Options {
    /// Version of the packages; Cargo.toml's if omitted. It may have a suffix: 0.1.0-rc.1.
    #[arg(long)]
    version: Option<String>,
    /// Folder to fill; target/packages if omitted.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Pack the output of `cargo xtask build`, which is quicker than a build for a release. For
    /// trials only.
    #[arg(long)]
    dev: bool,
    /// Also install the packages in private roots and run the image (needs root).
    #[arg(long)]
    check: bool,
}

/// Metadata that every package contains.
pub struct About {
    pub version: String,
    /// Modification time of all files in the packages, in Unix seconds.
    pub epoch_seconds: u32,
    /// Oldest version of the C library with which the programs run, such as `2.31`.
    pub glibc: String,
}

impl About {
    /// Returns the version in a form that .deb and .rpm sort correctly: a pre-release has a tilde.
    pub fn package_version(&self) -> String {
        self.version.replacen('-', "~", 1).replace('-', ".")
    }
}

/// The packages of one build, as file names and contents.
pub type Packages = BTreeMap<String, Vec<u8>>;

/// Builds the programs, packs twice, compares both results, and writes the packages.
pub fn run(options: &Options) -> Result<()> {
    let (version, epoch_seconds) = (version(options.version.as_deref())?, epoch_seconds()?);
    let built = if options.dev { build::dev()? } else { build::release()? };
    let about = About { version, epoch_seconds, glibc: built.glibc()? };
    output::step("Packing, twice");
    let bill = sbom::bill(&about, &image::libraries(&built)?)?;
    let programs = files::Programs::of(&built)?;
    let files = files::all(&programs, &built, &bill)?;
    let image = image::tree(&programs, &built, &bill)?;
    let packages = pack(&about, &files, &image, &bill)?;
    for (name, bytes) in pack(&about, &files, &image, &bill)? {
        if packages.get(&name) != Some(&bytes) {
            bail!("{name} differs when it is packed again: it is not reproducible");
        }
    }
    let out = options.out.clone().unwrap_or_else(|| target_dir().join("packages"));
    write(&out, &packages)?;
    for (name, bytes) in &packages {
        output::out(&format!(
            "{:>10.1} MiB  {}",
            bytes.len() as f64 / f64::from(1 << 20),
            out.join(name).display()
        ));
    }
    output::note(&format!(
        "needs glibc {} or newer; affinode-cluster and kubectl-affinode need none",
        about.glibc
    ));
    if options.check { check::all(&out, &about) } else { Ok(()) }
}

/// Builds the container image of existing artifacts. It is for tests, and has the name of a
/// release's image.
pub fn image_of(artifacts: &Artifacts) -> Result<Vec<u8>> {
    let built = build::of(artifacts)?;
    let (version, epoch_seconds) = (version(None)?, epoch_seconds()?);
    let about = About { version, epoch_seconds, glibc: built.glibc()? };
    let bill = sbom::bill(&about, &image::libraries(&built)?)?;
    image::pack(&about, &image::tree(&files::Programs::of(&built)?, &built, &bill)?)
}

fn pack(about: &About, files: &Tree, image: &Tree, bill: &[u8]) -> Result<Packages> {
    let version = about.package_version();
    let mut packages = Packages::new();
    packages.insert(format!("affinode_{version}_amd64.deb"), deb::pack(about, files)?);
    packages.insert(format!("affinode-{version}-1.x86_64.rpm"), rpm::pack(about, files)?);
    let image = image::pack(about, image)?;
    packages.insert(format!("affinode-{}-image.tar", about.version), image);
    packages.insert(format!("affinode-{}.cdx.json", about.version), bill.to_vec());
    Ok(packages)
}

/// Writes packages and their digests, and removes files of an earlier run.
fn write(out: &Path, packages: &Packages) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    for entry in fs::read_dir(out)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("affinode") || name == "SHA256SUMS" {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    let mut sums = String::new();
    for (name, bytes) in packages {
        let path = out.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        let digest: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        sums.push_str(&format!("{digest}  {name}\n"));
    }
    Ok(fs::write(out.join("SHA256SUMS"), sums)?)
}

/// Checks the version that was requested for the packages and returns it. If none was requested,
/// returns the version in Cargo.toml. A requested version must begin with the version in
/// Cargo.toml, which the programs print.
fn version(asked: Option<&str>) -> Result<String> {
    let own = env!("CARGO_PKG_VERSION");
    let asked = asked.map_or(own, |asked| asked.strip_prefix('v').unwrap_or(asked));
    let more = asked.strip_prefix(own).filter(|more| more.is_empty() || more.starts_with('-'));
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    if more.is_none() || !asked.chars().all(plain) {
        bail!("version {asked} does not match the programs' {own}; set it in Cargo.toml first");
    }
    Ok(asked.to_owned())
}

/// Returns the time of the commit in Unix seconds. Outside of a git checkout, returns
/// `SOURCE_DATE_EPOCH`.
fn epoch_seconds() -> Result<u32> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => sh::read(Command::new("git").current_dir(workspace_dir()).args([
            "log",
            "-1",
            "--format=%ct",
        ]))
        .context("this is not a git checkout, so SOURCE_DATE_EPOCH must be set")?,
    };
    text.trim().parse().with_context(|| format!("{:?} is not a time in seconds", text.trim()))
}
