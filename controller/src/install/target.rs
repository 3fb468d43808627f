//! The file into which the handler is written.
//!
//! | containerd is started by | file |
//! | --- | --- |
//! | a distribution, or the operator | the file that containerd was started with; with 1.x the last imported file that configures CRI |
//! | k3s, rke2, which render that file at each start | a file in the folder `config-v3.toml.d` if containerd imports it (newer releases), else the template |
//!
//! Up to containerd 1.7 an imported file replaces the whole section of which it sets a key
//! (NVIDIA's toolkit adds such files): the same section in other files is ignored, and a drop-in of
//! Affinode would replace all of it. So a drop-in is used only from version 3 of the configuration
//! on.
//! version 3 of the configuration on.

use std::{
    fs,
    path::{Path, PathBuf},
};

use toml::{Table, Value};

use crate::doctor::handler::PLUGINS;

/// Path of containerd's file of k3s and rke2, below their data folder.
const RENDERED: &str = "agent/etc/containerd/config.toml";
const FOLDER_V3: &str = "config-v3.toml.d";
const TEMPLATE_V3: &str = "config-v3.toml.tmpl";
const TEMPLATE: &str = "config.toml.tmpl";
/// Name of Affinode's file in that folder.
const DROP_IN: &str = "affinode.toml";

/// A file from which containerd's configuration is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstallTarget {
    /// The file that containerd was started with, or an imported one that replaces it.
    Root(PathBuf),
    /// A file that it imports.
    DropIn(PathBuf),
    /// The template from which its file is rendered at the start.
    Template(PathBuf),
}

impl InstallTarget {
    /// The target for a containerd with this file, whose content is `own`, and which imports these
    /// files.
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
        // The older template is read if there is no newer one, whatever its version.
        let newest = version >= 3 && (newer.exists() || !older.exists());
        InstallTarget::Template(if newest { newer } else { older })
    }

    /// Whether a handler in file `path` is read by a containerd with `file`. A template of k3s and
    /// rke2 is still read after an upgrade to a release that imports a folder. A file of that
    /// folder is not read after a downgrade, or with a template that imports none.
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

    /// Path of the file.
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
    fn the_last_import_of_the_section_is_edited() {
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
        // From this version on, sections are merged.
        assert_eq!(of(3), InstallTarget::Root(root.clone()));
    }

    #[test]
    fn a_rendered_file_is_never_edited() {
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
        // With this version an imported file would replace all of CRI's configuration.
        assert_eq!(of(&file, &import.replace('3', "2")), older);
        // Another template is in use: a new one would replace it.
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
