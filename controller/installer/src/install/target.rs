//! Chooses the file into which the handler is written.
//!
//! | containerd is started by | file |
//! | --- | --- |
//! | a distribution or the operator (containerd 2.x) | a file of Affinode's own in a folder that containerd's file imports. Without such a folder: containerd's file itself |
//! | a distribution or the operator (containerd 1.x) | the last file that configures CRI, and containerd's file too if it names handlers |
//! | k3s or rke2, which render containerd's file at each start | a file in the folder `config-v3.toml.d` if containerd imports that folder (newer releases), else the template |
//!
//! containerd 2 merges the sections of all files. The file whose name sorts last takes precedence.
//! NVIDIA's toolkit adds a file with copies of handlers from other files. The name of Affinode's
//! file therefore sorts after the name of the toolkit's file.
//!
//! Up to containerd 1.7, sections are not merged. An imported file that sets a key of a section
//! replaces the whole section of the files before it. A separate file of Affinode would therefore
//! remove all other handlers. The handler is added to the last file that configures CRI, which may
//! be the toolkit's file. The toolkit makes its file from containerd's own file, so the handler is
//! then added to containerd's own file too.

use std::{
    fs,
    path::{Path, PathBuf},
};

use toml::{Table, Value};

pub use crate::doctor::containerd::RENDERED;
use crate::doctor::handler::PLUGINS;

const FOLDER_V3: &str = "config-v3.toml.d";
const TEMPLATE_V3: &str = "config-v3.toml.tmpl";
const TEMPLATE: &str = "config.toml.tmpl";
/// Name of Affinode's file in the folder that k3s and rke2 import.
const RANCHER_DROP_IN: &str = "affinode.toml";
/// Name of Affinode's file in any other imported folder. It sorts after `99-nvidia.toml`.
const DROP_IN: &str = "99-zz-affinode.toml";

/// Returns whether a path is that of a configuration file that belongs to Affinode alone.
pub fn is_drop_in(path: impl AsRef<Path>) -> bool {
    let path = path.as_ref();
    path.ends_with(DROP_IN) || path.ends_with(Path::new(FOLDER_V3).join(RANCHER_DROP_IN))
}

/// Returns whether a file is a template of k3s or rke2.
pub fn is_template(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "tmpl")
}

/// A distribution that writes containerd's file anew at each start, from files that the
/// installation does not edit. How these files are merged was not tested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagedConfig {
    /// Name of the distribution.
    pub by: &'static str,
    /// Path into which an operator writes the handler.
    pub place: PathBuf,
}

impl ManagedConfig {
    /// Returns the distribution that writes containerd's file `file`. `text` is the file's content.
    /// `None`: no known distribution writes it.
    pub fn of(file: &Path, text: &str) -> Option<ManagedConfig> {
        let folder = file.parent()?;
        let managed = |line: &str| line.starts_with('#') && line.contains("k0s_managed=true");
        if text.lines().any(managed) {
            return Some(ManagedConfig { by: "k0s", place: folder.join("containerd.d") });
        }
        let template = folder.join("containerd-template.toml");
        let rendered = file.file_name() == Some("containerd.toml".as_ref()) && template.exists();
        rendered.then_some(ManagedConfig { by: "MicroK8s", place: template })
    }
}

/// The file into which the installation writes the handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstallTarget {
    /// The file with which containerd was started. If an imported file replaces the CRI section of
    /// that file, the target is the imported file.
    Root(PathBuf),
    /// A separate file of Affinode in a folder that containerd's file imports.
    DropIn(PathBuf),
    /// The template from which k3s or rke2 render containerd's file at each start.
    Template(PathBuf),
}

impl InstallTarget {
    /// Chooses the target for a containerd. `file` is its configuration file, `own` the content of
    /// that file, and `imported` the files that it imports. `merges`: whether containerd merges
    /// sections of several files, as 2.x does.
    pub fn of(file: &Path, own: &Table, imported: &[PathBuf], merges: bool) -> InstallTarget {
        let folder = file.parent().unwrap_or(Path::new("/"));
        let version = own.get("version").and_then(Value::as_integer).unwrap_or(1);
        let imports = own.get("imports").and_then(Value::as_array).into_iter().flatten();
        let mut imports = imports.filter_map(Value::as_str).map(|import| folder.join(import));
        if !file.ends_with(RENDERED) && merges {
            // Configuration version 1 has no imports, and other names for plugins.
            let last = imports.rfind(|import| version > 1 && import.ends_with("*.toml"));
            return match last.as_deref().and_then(Path::parent) {
                Some(folder) => InstallTarget::DropIn(folder.join(DROP_IN)),
                None => InstallTarget::Root(file.to_owned()),
            };
        }
        if !file.ends_with(RENDERED) {
            let covers = |path: &&PathBuf| path.as_path() != file && says_of_cri(path);
            let last = imported.iter().rev().find(covers).map(PathBuf::as_path);
            return InstallTarget::Root(last.unwrap_or(file).to_owned());
        }
        let drop_ins = folder.join(FOLDER_V3);
        let all = drop_ins.join("*.toml");
        if version >= 3 && imports.any(|import| import == all) {
            return InstallTarget::DropIn(drop_ins.join(RANCHER_DROP_IN));
        }
        let (newer, older) = (folder.join(TEMPLATE_V3), folder.join(TEMPLATE));
        // If the newer template does not exist, k3s and rke2 read the older template, even for a
        // file of version 3.
        let newest = version >= 3 && (newer.exists() || !older.exists());
        InstallTarget::Template(if newest { newer } else { older })
    }

    /// Returns whether k3s or rke2 render `file` from the template `path`. `own` is the content of
    /// `file`.
    pub fn renders(path: &Path, file: &Path, own: &Table) -> bool {
        let folder = file.parent().unwrap_or(Path::new("/"));
        let newer = folder.join(TEMPLATE_V3);
        let version = own.get("version").and_then(Value::as_integer).unwrap_or(1);
        let template = path == newer && version >= 3
            || path == folder.join(TEMPLATE) && (version < 3 || !newer.exists());
        file.ends_with(RENDERED) && template
    }

    /// Returns the path of the target file.
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

    #[test]
    fn managed_files_are_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("containerd.toml");
        let of = |text: &str| ManagedConfig::of(&file, text);
        let k0s = of("# k0s_managed=true\nversion = 2\n").unwrap();
        assert_eq!((k0s.by, k0s.place), ("k0s", folder.path().join("containerd.d")));
        // An operator removed the mark, so k0s no longer writes the file.
        assert_eq!(of("version = 2\n"), None);
        fs::write(folder.path().join("containerd-template.toml"), "").unwrap();
        assert_eq!(of("version = 2\n").unwrap().by, "MicroK8s");
        assert_eq!(ManagedConfig::of(&folder.path().join("config.toml"), "version = 2\n"), None);
    }

    fn of(file: &Path, own: &str) -> InstallTarget {
        InstallTarget::of(file, &own.parse().unwrap(), &[], false)
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
            InstallTarget::of(&root, &own, &imported, version > 2)
        };
        assert_eq!(of(2), InstallTarget::Root(second));
        // With version 3, containerd merges the sections of several files.
        assert_eq!(of(3), InstallTarget::Root(root.clone()));
    }

    /// If containerd 2 imports a folder, the handler must get a separate file in it. The file's
    /// name must sort after the name of the toolkit's file, because the copies of handlers in that
    /// file would otherwise take precedence.
    #[test]
    fn an_imported_folder_gets_a_file() {
        let root = Path::new("/etc/containerd/config.toml");
        let of = |own: &str, merges| InstallTarget::of(root, &own.parse().unwrap(), &[], merges);
        let imports = "version = 3\nimports = [\"/etc/x.toml\", \"conf.d/*.toml\"]\n";
        let InstallTarget::DropIn(path) = of(imports, true) else { panic!("no file of its own") };
        assert_eq!(path, Path::new("/etc/containerd/conf.d/99-zz-affinode.toml"));
        let name = path.file_name().and_then(|name| name.to_str()).unwrap();
        assert!(name > "99-nvidia.toml" && is_drop_in(&path));
        assert_eq!(of("version = 3\nimports = [\"/etc/x.toml\"]\n", true).path(), root);
        assert_eq!(of(imports, false).path(), root, "containerd 1.x does not merge");
    }

    #[test]
    fn a_rendered_file_is_never_edited() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("rke2/agent/etc/containerd");
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("config.toml");
        let import =
            format!("version = 3\nimports = [\"{}/*.toml\"]", folder.join(FOLDER_V3).display());
        assert_eq!(
            of(&file, &import),
            InstallTarget::DropIn(folder.join(FOLDER_V3).join(RANCHER_DROP_IN))
        );
        let newer = InstallTarget::Template(folder.join(TEMPLATE_V3));
        let older = InstallTarget::Template(folder.join(TEMPLATE));
        assert_eq!(of(&file, "version = 3\nimports = [\"/etc/x/*.toml\"]"), newer);
        // A containerd file of version 2 belongs to containerd 1.x, in which an imported file would
        // replace all of CRI's configuration.
        assert_eq!(of(&file, &import.replace('3', "2")), older);
        // k3s already uses another template, which a new file would replace.
        fs::write(folder.join(TEMPLATE), "").unwrap();
        assert_eq!(of(&file, "version = 3"), older);
        fs::write(folder.join(TEMPLATE_V3), "").unwrap();
        assert_eq!(of(&file, "version = 3"), newer);
        let newer = folder.join(TEMPLATE_V3);
        let [importing, plain, old] =
            [import.as_str(), "version = 3", "version = 2"].map(|own| own.parse().unwrap());
        let read = |path: &Path, own: &Table| InstallTarget::renders(path, &file, own);
        assert!(read(&newer, &importing) && read(&newer, &plain) && !read(&newer, &old));
        assert!(!read(&folder.join(TEMPLATE), &plain) && read(&folder.join(TEMPLATE), &old));
        let usual = Path::new("/etc/containerd/config.toml");
        assert!(!InstallTarget::renders(&folder.join(TEMPLATE), usual, &old));
        assert_eq!(of(usual, "version = 2"), InstallTarget::Root(usual.to_owned()));
    }
}
