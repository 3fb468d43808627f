//! Which file the handler goes into.
//!
//! | who starts containerd | file |
//! | --- | --- |
//! | a distribution, or you | the one that containerd was started with; with 1.x the last one that it imports and that says something of CRI |
//! | k3s, rke2, which write that one anew at each start | one in the folder `config-v3.toml.d` that it imports as newer ones do, else the template that it is made from |
//!
//! Up to containerd 1.7 a file that is imported takes the place of the whole section that it names
//! a key of (NVIDIA's toolkit adds such files): what stands elsewhere does not count, and what we
//! would add in a file of our own would take the place of all the rest. So a folder is used from
//! version 3 of the configuration on.

use std::{
    fs,
    path::{Path, PathBuf},
};

use toml::{Table, Value};

use crate::doctor::handler::PLUGINS;

/// Where k3s and rke2 keep containerd's file, below their folder of data.
const RENDERED: &str = "agent/etc/containerd/config.toml";
const FOLDER_V3: &str = "config-v3.toml.d";
const TEMPLATE_V3: &str = "config-v3.toml.tmpl";
const TEMPLATE: &str = "config.toml.tmpl";
/// Our file in that folder.
const DROP_IN: &str = "affinode.toml";

/// A file that containerd's configuration comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstallTarget {
    /// The one that it was started with, or one that takes its place.
    Root(PathBuf),
    /// One that it imports.
    DropIn(PathBuf),
    /// One that it is made from when it starts.
    Template(PathBuf),
}

impl InstallTarget {
    /// For a containerd with this file, which says `own`, and which has read these files.
    pub fn of(file: &Path, own: &Table, imported: &[PathBuf]) -> InstallTarget {
        let folder = file.parent().unwrap_or(Path::new("/"));
        let version = own.get("version").and_then(Value::as_integer).unwrap_or(1);
        if !file.ends_with(RENDERED) {
            let covers =
                |path: &&PathBuf| version == 2 && path.as_path() != file && says_of_cri(path);
            let last = imported.iter().rev().find(covers).map(PathBuf::as_path);
            return InstallTarget::Root(last.unwrap_or(file).to_owned());
        }
        let drop_ins = folder.join(FOLDER_V3);
        let all = drop_ins.join("*.toml");
        let imports = own.get("imports").and_then(Value::as_array).into_iter().flatten();
        let mut imports = imports.filter_map(Value::as_str).map(|import| folder.join(import));
        if version >= 3 && imports.any(|import| import == all) {
            return InstallTarget::DropIn(drop_ins.join(DROP_IN));
        }
        let (newer, older) = (folder.join(TEMPLATE_V3), folder.join(TEMPLATE));
        // The older one is read where there is no newer one, whatever it is written in.
        let newest = version >= 3 && (newer.exists() || !older.exists());
        InstallTarget::Template(if newest { newer } else { older })
    }

    /// Whether a handler in this file reaches a containerd with that one. A template of k3s and
    /// rke2 does also where they have learned to import a folder since; a file of the folder does
    /// no more where an older k3s, or somebody's template, imports none.
    pub fn is_read_by(path: &Path, file: &Path, own: &Table, imported: &[PathBuf]) -> bool {
        if InstallTarget::of(file, own, imported).path() == path {
            return true;
        }
        let folder = file.parent().unwrap_or(Path::new("/"));
        let newer = folder.join(TEMPLATE_V3);
        let version = own.get("version").and_then(Value::as_integer).unwrap_or(1);
        let template = path == newer && version >= 3
            || path == folder.join(TEMPLATE) && (version < 3 || !newer.exists());
        file.ends_with(RENDERED) && template
    }

    /// The file.
    pub fn path(&self) -> &Path {
        match self {
            InstallTarget::Root(path)
            | InstallTarget::DropIn(path)
            | InstallTarget::Template(path) => path,
        }
    }
}

fn says_of_cri(path: &Path) -> bool {
    let text = fs::read_to_string(path).unwrap_or_default();
    let said = text.parse::<Table>().unwrap_or_default();
    said.get("plugins").and_then(|plugins| plugins.get(PLUGINS[0])).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(file: &Path, own: &str) -> InstallTarget {
        InstallTarget::of(file, &own.parse().unwrap(), &[])
    }

    #[test]
    fn a_file_that_takes_the_place_of_the_section_is_the_one() {
        let folder = tempfile::tempdir().unwrap();
        let [root, first, second, other] =
            ["config.toml", "1.toml", "2.toml", "3.toml"].map(|name| folder.path().join(name));
        let section = format!("version = 2\n[plugins.\"{}\".containerd]\n", PLUGINS[0]);
        for file in [&root, &first, &second] {
            fs::write(file, &section).unwrap();
        }
        fs::write(&other, "version = 2\n[debug]\n").unwrap();
        let imported = [root.clone(), first, second.clone(), other];
        let of = |version: i64| {
            let own = Table::from_iter([("version".to_owned(), version.into())]);
            InstallTarget::of(&root, &own, &imported)
        };
        assert_eq!(of(2), InstallTarget::Root(second));
        // From then on sections are merged.
        assert_eq!(of(3), InstallTarget::Root(root.clone()));
    }

    #[test]
    fn a_file_that_is_written_anew_at_each_start_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("rke2/agent/etc/containerd");
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("config.toml");
        let import =
            format!("version = 3\nimports = [\"{}/*.toml\"]", folder.join(FOLDER_V3).display());
        assert_eq!(of(&file, &import), InstallTarget::DropIn(folder.join(FOLDER_V3).join(DROP_IN)));
        let newer = InstallTarget::Template(folder.join(TEMPLATE_V3));
        let older = InstallTarget::Template(folder.join(TEMPLATE));
        assert_eq!(of(&file, "version = 3\nimports = [\"/etc/x/*.toml\"]"), newer);
        // There a file that is imported would take the place of all that CRI is told.
        assert_eq!(of(&file, &import.replace('3', "2")), older);
        // Another template in use: a new one would take its place.
        fs::write(folder.join(TEMPLATE), "").unwrap();
        assert_eq!(of(&file, "version = 3"), older);
        fs::write(folder.join(TEMPLATE_V3), "").unwrap();
        assert_eq!(of(&file, "version = 3"), newer);
        let own = import.parse().unwrap();
        let read = |path: &Path, own: &Table| InstallTarget::is_read_by(path, &file, own, &[]);
        let (drop_in, newer) = (folder.join(FOLDER_V3).join(DROP_IN), folder.join(TEMPLATE_V3));
        let [importing, plain, old] =
            [import.as_str(), "version = 3", "version = 2"].map(|own| own.parse().unwrap());
        assert!(read(&drop_in, &importing) && !read(&drop_in, &plain));
        assert!(read(&newer, &importing) && read(&newer, &plain) && !read(&newer, &old));
        assert!(!read(&folder.join(TEMPLATE), &plain) && read(&folder.join(TEMPLATE), &old));
        assert!(!InstallTarget::is_read_by(Path::new("/etc/x.toml"), &file, &own, &[]));
        let usual = Path::new("/etc/containerd/config.toml");
        assert!(!InstallTarget::is_read_by(Path::new("/etc/containerd/x.toml"), usual, &own, &[]));
        assert_eq!(of(usual, "version = 2"), InstallTarget::Root(usual.to_owned()));
    }
}
