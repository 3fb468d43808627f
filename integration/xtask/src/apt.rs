//! Fetches packages from other suites (releases) of this machine's distribution into a private
//! folder. Nothing is installed, and apt verifies every signature and checksum.
//!
//! The mirror and the keyring are those that apt uses on this machine. Only the suite differs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::sh;

/// One package source in apt's configuration: a mirror, its suites and its keyring.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    uri: String,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

/// A private package index that contains suites of the distribution.
pub struct Suites {
    folder: PathBuf,
}

/// Identity of this machine's distribution: `ID` and `VERSION_CODENAME` of os-release.
pub struct Distribution {
    pub id: String,
    pub codename: String,
}

impl Distribution {
    pub fn here() -> Result<Self> {
        let text =
            std::fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
                .map(|value| value.trim_matches('"').to_owned())
                .unwrap_or_default()
        };
        Ok(Self { id: field("ID"), codename: field("VERSION_CODENAME") })
    }
}

/// Unpacks a package of the machine's own suites into `target` without installing it, so that its
/// services do not start.
pub fn unpack_own(package: &str, target: &Path) -> Result<()> {
    let fetched = target.with_extension("deb.d");
    std::fs::create_dir_all(&fetched)?;
    let download = || {
        let mut command = Command::new("apt-get");
        command.current_dir(&fetched).args(["-oAPT::Sandbox::User=root", "download", package]);
        sh::read(&mut command)
    };
    if download().is_err() {
        // The usual cause is that the machine's package indexes are outdated or were never fetched.
        sh::read(Command::new("apt-get").arg("update"))?;
        download()?;
    }
    let deb = std::fs::read_dir(&fetched)?.next().context("apt downloaded nothing")??.path();
    std::fs::create_dir_all(target)?;
    sh::read(Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(target))?;
    std::fs::remove_dir_all(fetched)?;
    Ok(())
}

impl Suites {
    /// Fetches the package indexes of `suites` from a mirror. It is the mirror that apt's
    /// configuration on this machine names for the distribution `codename`.
    pub fn open(folder: &Path, codename: &str, suites: &[&str]) -> Result<Self> {
        let source = serving(codename)?;
        for sub in ["lists/partial", "cache/archives/partial"] {
            std::fs::create_dir_all(folder.join(sub))?;
        }
        let text: String = suites.iter().map(|suite| source.line(suite) + "\n").collect();
        std::fs::write(folder.join("sources.list"), text)?;
        let opened = Self { folder: folder.to_path_buf() };
        sh::read(opened.apt("apt-get").arg("update"))
            .context("cannot fetch the package indexes")?;
        Ok(opened)
    }

    /// Returns the versions of a package, newest first, each with its suite.
    pub fn versions(&self, package: &str) -> Result<Vec<(String, String)>> {
        // A line of the table: containerd | 2.1.9+ds1-5 | http://… forky/main amd64 Packages
        let table = sh::read(self.apt("apt-cache").args(["madison", package]))?;
        let rows = table.lines().filter_map(|row| {
            let mut fields = row.split('|').map(str::trim);
            let version = fields.nth(1)?.to_owned();
            let suite = fields.next()?.split(' ').nth(1)?.split('/').next()?.to_owned();
            Some((version, suite))
        });
        Ok(rows.collect())
    }

    /// Fetches a package and unpacks it, without installing it, into `target`.
    pub fn unpack(&self, package: &str, version: &str, target: &Path) -> Result<()> {
        let debs = self.folder.join("debs");
        // The folder for downloads is emptied first, so that the fetched package is its only file.
        if debs.exists() {
            std::fs::remove_dir_all(&debs)?;
        }
        std::fs::create_dir_all(&debs)?;
        sh::read(
            self.apt("apt-get")
                .current_dir(&debs)
                .args(["download", &format!("{package}={version}")]),
        )?;
        let deb = std::fs::read_dir(&debs)?.next().context("apt downloaded nothing")??.path();
        std::fs::create_dir_all(target)?;
        sh::read(Command::new("dpkg-deb").arg("--extract").arg(&deb).arg(target))?;
        std::fs::remove_dir_all(debs)?;
        Ok(())
    }

    /// Removes the package indexes, which are larger than the fetched packages.
    pub fn remove(self) -> Result<()> {
        Ok(std::fs::remove_dir_all(&self.folder)?)
    }

    fn apt(&self, program: &str) -> Command {
        let folder = self.folder.display();
        let mut command = Command::new(program);
        command.args([
            format!("-oDir::Etc::SourceList={folder}/sources.list"),
            "-oDir::Etc::SourceParts=-".into(),
            format!("-oDir::State::Lists={folder}/lists"),
            format!("-oDir::Cache={folder}/cache"),
            "-oAPT::Sandbox::User=root".into(),
            "-oAcquire::Languages=none".into(),
            "-oAPT::Update::Error-Mode=any".into(),
        ]);
        command
    }
}

/// Returns a line for sources.list with which apt finds the suite `codename`. Its mirror and
/// keyring come from this machine's apt configuration.
pub fn source_line(codename: &str) -> Result<String> {
    Ok(serving(codename)?.line(codename))
}

/// Returns the source in apt's configuration that serves this suite.
fn serving(codename: &str) -> Result<Source> {
    machine_sources()?
        .into_iter()
        .find(|source| source.suites.iter().any(|suite| suite == codename))
        .with_context(|| {
            format!("no entry for {codename} in /etc/apt/sources.list or sources.list.d")
        })
}

impl Source {
    fn line(&self, suite: &str) -> String {
        let signed = self.signed_by.as_ref().map(|key| format!("[signed-by={key}] "));
        format!("deb {}{} {suite} main", signed.unwrap_or_default(), self.uri)
    }
}

fn machine_sources() -> Result<Vec<Source>> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let mut sources = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else {
            continue;
        };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(parse_line)),
            Some("sources") => sources.extend(text.split("\n\n").filter_map(parse_stanza)),
            _ => {}
        }
    }
    if sources.is_empty() {
        bail!("apt has no sources on this machine");
    }
    Ok(sources)
}

/// Parses a line of sources.list, such as `deb [signed-by=/k] http://mirror/debian bookworm main
/// contrib`.
fn parse_line(line: &str) -> Option<Source> {
    let rest = line.trim().strip_prefix("deb ")?.trim();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
    Some(Source {
        uri: words.next()?,
        suites: vec![words.next()?],
        components: words.collect(),
        signed_by: signed_by.map(str::to_owned),
    })
}

/// Parses a stanza of apt's deb822 format: one `Name: value` per line, a blank line between
/// stanzas.
fn parse_stanza(stanza: &str) -> Option<Source> {
    let fields: BTreeMap<&str, &str> = stanza
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim(), value.trim()))
        .collect();
    let words = |name: &str| -> Vec<String> {
        fields
            .get(name)
            .map(|value| value.split_whitespace().map(str::to_owned).collect())
            .unwrap_or_default()
    };
    if !words("Types").iter().any(|kind| kind == "deb") || fields.get("Enabled") == Some(&"no") {
        return None;
    }
    Some(Source {
        uri: words("URIs").into_iter().next()?,
        suites: words("Suites"),
        components: words("Components"),
        signed_by: words("Signed-By").into_iter().next(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_sources_are_read() {
        let line =
            parse_line("deb [arch=amd64 signed-by=/k.gpg] http://m/debian bookworm main contrib");
        let stanza = parse_stanza(
            "Types: deb deb-src\n# a comment\nURIs: http://m/debian\nSuites: bookworm\nComponents: main contrib\nSigned-By: /k.gpg",
        );
        assert_eq!(line, stanza);
        assert_eq!(line.map(|source| source.suites), Some(vec!["bookworm".to_owned()]));
    }

    #[test]
    fn comments_and_disabled_entries_are_skipped() {
        assert_eq!(parse_line("# deb http://m/debian bookworm main"), None);
        assert_eq!(parse_line("deb-src http://m/debian bookworm main"), None);
        assert_eq!(parse_stanza("Types: deb\nEnabled: no\nURIs: http://m\nSuites: x"), None);
    }
}
