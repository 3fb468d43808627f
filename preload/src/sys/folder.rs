//! Searches for names in a folder without libc.

use core::ffi::CStr;

use super::{CLOEXEC, close, number, plain};

/// Number of bytes of a directory entry before its name: inode, offset, length of the entry, type.
const HEAD_BYTES: usize = 19;
const LENGTH_AT: core::ops::Range<usize> = 16..18;

/// Whether `which` returns true for any name in a folder. Returns `None` if the folder cannot be
/// read.
pub fn has(path: &CStr, mut which: impl FnMut(&[u8]) -> bool) -> Option<bool> {
    any(path, |_, name| which(name.to_bytes()))
}

/// Whether `which` returns true for the target of any symbolic link in a folder. Returns `None` if
/// the folder cannot be read.
pub fn has_link(path: &CStr, which: impl Fn(&[u8]) -> bool) -> Option<bool> {
    any(path, |folder, name| {
        let mut target = [0_u8; 256];
        let (name, at) = (name.as_ptr() as usize, target.as_mut_ptr() as usize);
        // A name that is not a link, or no longer exists, has no target.
        let bytes = plain(number::READLINKAT, [folder, name, at, target.len(), 0, 0]);
        bytes.is_ok_and(|bytes| target.get(..bytes).is_some_and(&which))
    })
}

fn any(path: &CStr, mut which: impl FnMut(usize, &CStr) -> bool) -> Option<bool> {
    const O_DIRECTORY_CLOEXEC: usize = 0o200_000 | CLOEXEC;
    let args = [path.as_ptr() as usize, O_DIRECTORY_CLOEXEC, 0, 0, 0, 0];
    let fd = plain(number::OPEN, args).ok()?;
    let mut buffer = [0_u8; 2048];
    let found = loop {
        let args = [fd, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0];
        match plain(number::GETDENTS64, args) {
            Ok(0) => break Some(false),
            Ok(bytes)
                if buffer
                    .get(..bytes)
                    .is_some_and(|all| names(all).any(|name| which(fd, name))) =>
            {
                break Some(true);
            }
            Ok(_) => {}
            Err(_) => break None,
        }
    };
    close(fd as i32);
    found
}

/// Iterates over the names in a buffer of directory entries.
fn names(mut entries: &[u8]) -> impl Iterator<Item = &CStr> {
    core::iter::from_fn(move || {
        let length = entries.get(LENGTH_AT)?.try_into().ok().map(u16::from_ne_bytes)?;
        let entry = entries.get(..usize::from(length))?;
        entries = entries.get(usize::from(length)..)?;
        CStr::from_bytes_until_nul(entry.get(HEAD_BYTES..)?).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_many_there_are() {
        let dir = std::env::temp_dir().join(format!("affinode-folder-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        for n in 0..300 {
            std::fs::write(dir.join(format!("name-{n}")), "").unwrap();
        }
        let path = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
        for n in 0..300 {
            assert_eq!(has(&path, |name| name == format!("name-{n}").as_bytes()), Some(true));
        }
        assert_eq!(has(&path, |name| name == b"name-300" || name.is_empty()), Some(false));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(has(&path, |_| true), None);
    }

    #[test]
    fn links_are_followed_by_one_step() {
        let dir = std::env::temp_dir().join(format!("affinode-links-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("none"), "").unwrap();
        std::os::unix::fs::symlink("/nonexistent/a", dir.join("one")).unwrap();
        let path = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
        assert_eq!(has_link(&path, |to| to == b"/nonexistent/a"), Some(true));
        assert_eq!(has_link(&path, |to| to.is_empty() || to == b"/nonexistent/b"), Some(false));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(has_link(&path, |_| true), None);
    }
}
