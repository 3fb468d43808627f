//! Fuzz target for files and folders of a container image. The author of an image is not trusted.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use affinode_shim::rootfs::{ResolvedPath, RootfsLayers};
use arbitrary::{Result, Unstructured};
use containerd_shim_protos::types::mount::Mount;
use rustix::fs::{Mode, OFlags, ResolveFlags, XattrFlags};

/// Path of the file in the image that the shim looks up.
const ASKED: &str = "/etc/ld.so.preload";
const MAX_BYTES: u64 = 64;
/// Names from which the target builds paths: the names in the path that is looked up, and other
/// names.
const NAMES: [&str; 8] = ["etc", "ld.so.preload", "a", "b", ".wh.etc", "usr", "..", "."];
/// Content of a file outside the image. No file in the image has this content, so a read outside
/// the image is noticed.
const OUTSIDE: &[u8] = b"outside";

/// Builds image layers from the input, and looks up a file in them. Files outside the layers must
/// never be read, and files above the size limit must not be returned. With one layer, the result
/// must equal the kernel's.
pub fn image(data: &[u8]) {
    let Ok(folder) = tempfile::tempdir() else { return };
    let mut bytes = Unstructured::new(data);
    let Ok(layers) = build(folder.path(), &mut bytes) else { return };
    let mount = mount(&layers);
    let Ok(rootfs) = RootfsLayers::new(&[mount], None, folder.path()) else {
        panic!("the shim refused an overlay of absolute folders")
    };
    let found = rootfs.find(ASKED, MAX_BYTES);
    if let Ok(ResolvedPath::Regular(content)) = &found {
        assert!(content.len() as u64 <= MAX_BYTES, "{} bytes", content.len());
        assert!(!content.starts_with(OUTSIDE), "a file outside of the image was read");
    }
    if let [layer] = &layers[..] {
        let theirs = by_the_kernel(layer);
        match (&found, &theirs) {
            (Ok(ResolvedPath::Regular(ours)), Some(theirs)) => assert!(ours == theirs),
            (Ok(ResolvedPath::Regular(_)), None) => {
                panic!("the shim finds a file where the kernel finds none")
            }
            (Ok(_), Some(theirs)) if theirs.len() as u64 <= MAX_BYTES => {
                panic!("the kernel finds a file, but the shim finds {found:?}")
            }
            _ => {}
        }
    }
}

fn mount(layers: &[PathBuf]) -> Mount {
    let list: Vec<String> = layers.iter().map(|layer| layer.display().to_string()).collect();
    Mount {
        type_: "overlay".into(),
        options: vec![format!("lowerdir={}", list.join(":"))],
        ..Mount::default()
    }
}

/// Returns the content that `/etc/ld.so.preload` has for a process with the root folder `layer`.
/// The kernel itself resolves the path.
fn by_the_kernel(layer: &Path) -> Option<Vec<u8>> {
    let root = File::open(layer).ok()?;
    let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let found = rustix::fs::openat2(
        &root,
        ASKED.trim_start_matches('/'),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
        within,
    );
    let mut file = File::from(found.ok()?);
    let mut content = Vec::new();
    let is_file = file.metadata().ok()?.is_file();
    is_file.then(|| file.read_to_end(&mut content).ok().map(|_| content)).flatten()
}

fn build(folder: &Path, bytes: &mut Unstructured<'_>) -> Result<Vec<PathBuf>> {
    let made = |done: std::io::Result<()>| done.is_ok();
    let outside = folder.join("outside");
    made(fs::create_dir_all(outside.join("etc")));
    for name in ["etc/ld.so.preload", "ld.so.preload", "a", "b"] {
        made(fs::write(outside.join(name), OUTSIDE));
    }
    let many = bytes.int_in_range(1..=3)?;
    let layers: Vec<PathBuf> = (0..many).map(|layer| folder.join(layer.to_string())).collect();
    for layer in &layers {
        made(fs::create_dir(layer));
    }
    for _ in 0..64 {
        if bytes.is_empty() {
            break;
        }
        let layer = &layers[bytes.choose_index(layers.len())?];
        let at = layer.join(path(bytes, false)?);
        // Links of the image are not followed while the image is created.
        if at
            .parent()
            .and_then(|parent| parent.canonicalize().ok())
            .is_none_or(|parent| !layer.canonicalize().is_ok_and(|layer| parent.starts_with(layer)))
        {
            continue;
        }
        match bytes.int_in_range(0..=6)? {
            0 | 1 => drop(fs::create_dir(&at)),
            2 => {
                let large = bytes.ratio(1, 4)?;
                let size = if large { MAX_BYTES as usize + 1 } else { 8 };
                let is_link = fs::symlink_metadata(&at).is_ok_and(|found| found.is_symlink());
                if !is_link {
                    made(fs::write(&at, vec![b'i'; size]));
                }
            }
            3 | 4 => {
                let target = match bytes.int_in_range(0..=5)? {
                    0 => outside.join("etc/ld.so.preload"),
                    1 => outside.clone(),
                    2 => PathBuf::from("../../outside"),
                    3 => PathBuf::from("/proc/self/cwd"),
                    _ => path(bytes, true)?,
                };
                made(symlink(target, &at));
            }
            5 => {
                let name = bytes.choose(&["opaque", "whiteout", "redirect", "metacopy"])?;
                let name = format!("user.overlay.{name}");
                let _ = rustix::fs::lsetxattr(&at, name, b"y", XattrFlags::empty());
            }
            _ => drop(fs::remove_file(&at)),
        }
    }
    Ok(layers)
}

/// Builds a path from a few names. If `is_target` is true, the path is the target of a symbolic
/// link, and the input's bytes can make it very long.
fn path(bytes: &mut Unstructured<'_>, is_target: bool) -> Result<PathBuf> {
    let mut path = PathBuf::new();
    if is_target && bytes.ratio(1, 2)? {
        path.push("/");
    }
    let names = if is_target { &NAMES[..] } else { &NAMES[..6] };
    for _ in 0..bytes.int_in_range(1..=3)? {
        path.push(bytes.choose(names)?);
    }
    if is_target && bytes.ratio(1, 16)? {
        path.push("./../".repeat(400));
    }
    Ok(path)
}
