use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::*;

const FILE: &str = "/etc/ld.so.preload";

/// Layers of a rootfs in a temporary folder, topmost first.
struct Tree {
    dir: tempfile::TempDir,
    layers: usize,
}

impl Tree {
    fn new(layers: usize) -> Tree {
        let dir = tempfile::tempdir().unwrap();
        for layer in 0..layers {
            fs::create_dir(dir.path().join(layer.to_string())).unwrap();
        }
        Tree { dir, layers }
    }

    fn path(&self, layer: usize, path: &str) -> PathBuf {
        let path = self.dir.path().join(layer.to_string()).join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn file(self, layer: usize, path: &str, text: &str) -> Tree {
        fs::write(self.path(layer, path), text).unwrap();
        self
    }

    fn link(self, layer: usize, path: &str, target: &str) -> Tree {
        symlink(target, self.path(layer, path)).unwrap();
        self
    }

    fn folder(self, layer: usize, path: &str) -> Tree {
        fs::create_dir_all(self.path(layer, path)).unwrap();
        self
    }

    /// Sets an overlayfs attribute with the prefix `user.`, which needs no privilege. Returns false
    /// if the file system does not support it.
    fn mark(&self, layer: usize, path: &str, name: &str, value: &str) -> bool {
        let path = self.path(layer, path);
        let name = format!("user.overlay.{name}");
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(&path, name, value.as_bytes(), flags).is_ok()
    }

    fn find(&self, path: &str) -> Result<ResolvedPath, RootfsError> {
        let open = |layer: usize| {
            rustix::fs::open(
                self.dir.path().join(layer.to_string()),
                OFlags::PATH | OFlags::DIRECTORY,
                Mode::empty(),
            )
            .unwrap()
        };
        super::find((0..self.layers).map(open).collect(), Path::new(path), 64)
    }
}

fn text(text: &str) -> ResolvedPath {
    ResolvedPath::Regular(text.as_bytes().to_vec())
}

#[test]
fn the_topmost_layer_wins() {
    let tree = Tree::new(3)
        .file(1, "etc/ld.so.preload", "middle")
        .file(2, "etc/ld.so.preload", "bottom")
        .folder(0, "etc");
    assert_eq!(tree.find(FILE).unwrap(), text("middle"));
    assert_eq!(tree.find("/etc/other").unwrap(), ResolvedPath::Missing);
    assert_eq!(tree.find("/etc").unwrap(), ResolvedPath::Other("a folder"));
}

#[test]
fn a_whiteout_hides_what_is_below() {
    let tree = Tree::new(2).file(1, "etc/ld.so.preload", "bottom").folder(0, "etc");
    let device = rustix::fs::mknodat(
        rustix::fs::CWD,
        tree.path(0, "etc/ld.so.preload"),
        FileType::CharacterDevice,
        Mode::empty(),
        0,
    );
    // A test without privileges may not be allowed to create this device.
    if device.is_ok() {
        assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Missing);
    }
    let tree = Tree::new(2).file(1, "etc/ld.so.preload", "bottom").file(0, "etc/ld.so.preload", "");
    if tree.mark(0, "etc/ld.so.preload", "whiteout", "y") {
        assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Missing);
    }
}

#[test]
fn an_opaque_folder_hides_what_is_below() {
    let tree = Tree::new(2).file(1, "etc/ld.so.preload", "bottom").folder(0, "etc");
    if tree.mark(0, "etc", "opaque", "y") {
        assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Missing);
    }
}

#[test]
fn a_file_between_folders_hides_the_lower_one() {
    let tree = Tree::new(3).folder(0, "etc").file(1, "etc", "a file").file(
        2,
        "etc/ld.so.preload",
        "bottom",
    );
    assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Missing);
}

#[test]
fn symlinks_are_followed_within_the_tree() {
    let tree = Tree::new(2)
        .link(0, "etc", "usr/etc")
        .link(1, "usr/etc/ld.so.preload", "../../lib/./preload")
        .link(0, "lib", "/usr/lib")
        .file(1, "usr/lib/preload", "found");
    assert_eq!(tree.find(FILE).unwrap(), text("found"));
}

#[test]
fn no_symlink_leads_out() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    fs::write(secret.path(), "secret").unwrap();
    let absolute = secret.path().to_str().unwrap();
    let up = format!("{}{absolute}", "../".repeat(30));
    for target in [absolute, &up, "/proc/self/environ", "/etc/passwd", "../../../../etc/passwd"] {
        let tree = Tree::new(1).link(0, "etc/ld.so.preload", target);
        let found = tree.find(FILE).unwrap();
        assert_eq!(found, ResolvedPath::Other("a dangling symlink"), "{target}");
        let tree = Tree::new(1).link(0, "etc", target.rsplit_once('/').unwrap().0);
        assert!(!matches!(tree.find(FILE), Ok(ResolvedPath::Regular(_))), "{target}");
    }
}

#[test]
fn loops_end() {
    let tree = Tree::new(1).link(0, "etc/ld.so.preload", "ld.so.preload");
    assert!(matches!(tree.find(FILE), Err(RootfsError::TooLong(_))));
    // The number of names in the path doubles with each link: the limit of names must end the
    // lookup before the limit of links does.
    let mut tree = Tree::new(1);
    for step in 0..30 {
        let next = format!("l{}", step + 1);
        tree = tree.link(0, &format!("l{step}"), &format!("{next}/../{next}"));
    }
    let tree = tree.folder(0, "l30").link(0, "etc/ld.so.preload", "/l0");
    assert!(matches!(tree.find(FILE), Err(RootfsError::TooLong(_))));
}

#[test]
fn only_regular_files_are_opened() {
    let tree = Tree::new(1).folder(0, "etc");
    let path = tree.path(0, "etc/ld.so.preload");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
    // Opening this pipe would block forever.
    assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Other("a pipe"));
    fs::remove_file(&path).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Other("a socket"));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Other("a folder"));
}

#[test]
fn large_files_are_refused() {
    let tree = Tree::new(1).file(0, "etc/ld.so.preload", &"x".repeat(64));
    assert_eq!(tree.find(FILE).unwrap(), text(&"x".repeat(64)));
    let tree = Tree::new(1).file(0, "etc/ld.so.preload", &"x".repeat(65));
    assert!(matches!(tree.find(FILE), Err(RootfsError::TooLarge { .. })));
}

#[test]
fn a_file_in_place_of_a_folder_is_an_error() {
    let tree = Tree::new(1).file(0, "etc", "a file");
    assert!(matches!(tree.find(FILE), Err(RootfsError::Io { .. })));
}

/// A path in which a regular file is in place of a folder must find no file. The kernel and the
/// loader that reads the preload list find no file at such a path either.
#[test]
fn path_through_a_file_finds_no_file() {
    for target in ["b/.", "b/", "./b/./"] {
        let tree = Tree::new(1).file(0, "etc/b", "ours").link(0, "etc/ld.so.preload", target);
        assert!(matches!(tree.find(FILE), Err(RootfsError::Io { .. })), "{target}");
    }
    let tree = Tree::new(1).file(0, "etc/b", "ours").link(0, "etc/ld.so.preload", ".//./b");
    assert_eq!(tree.find(FILE).unwrap(), ResolvedPath::Regular(b"ours".to_vec()));
}
