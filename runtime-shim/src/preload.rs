//! The merged `/etc/ld.so.preload`: our line, then what the image had.
//!
//! glibc reads names separated by blanks, colons and newlines, and comments from
//! `#` to the end of a line. musl and static programs do not read the file.

use affinode_proto::paths::CONTAINER_LIB;

/// The file in an image.
pub const FILE: &str = "/etc/ld.so.preload";
/// Bound on what an image's own file may hold.
pub const MAX_BYTES: u64 = 64 << 10;

/// Our line first, so that our `dlsym` is found before another's; the image's own
/// bytes after it, as they are.
#[must_use]
pub fn merge(own: Option<&[u8]>) -> Vec<u8> {
    let own = own.unwrap_or_default();
    if names(own).any(|name| name == CONTAINER_LIB.as_bytes()) {
        return own.to_vec();
    }
    [CONTAINER_LIB.as_bytes(), b"\n", own].concat()
}

fn names(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
        .map(|line| line.split(|byte| *byte == b'#').next().unwrap_or_default())
        .flat_map(|line| line.split(|byte| b" \t:".contains(byte)))
        .filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LINE: &str = "/.affinode/lib/libaffinode_preload.so";

    #[test]
    fn our_line_comes_first() {
        for (own, wanted) in [
            (None, format!("{LINE}\n")),
            (Some(""), format!("{LINE}\n")),
            (Some("/lib/a.so"), format!("{LINE}\n/lib/a.so")),
            (Some("/a.so:/b.so # why\n"), format!("{LINE}\n/a.so:/b.so # why\n")),
            (Some("# /.affinode/lib/libaffinode_preload.so\n"), format!("{LINE}\n# {LINE}\n")),
        ] {
            assert_eq!(merge(own.map(str::as_bytes)), wanted.as_bytes());
        }
    }

    #[test]
    fn an_image_that_has_the_line_keeps_its_file() {
        for own in [format!("/a.so:{LINE}\n"), LINE.to_owned(), format!("/a {LINE} /b")] {
            assert_eq!(merge(Some(own.as_bytes())), own.as_bytes());
        }
    }

    proptest! {
        #[test]
        fn whatever_the_image_has_stays(own: Vec<u8>) {
            let merged = merge(Some(&own));
            prop_assert!(merged.ends_with(&own));
            prop_assert!(names(&merged).any(|name| name == LINE.as_bytes()));
            prop_assert_eq!(merge(Some(&merged)), merged.clone());
            let others: Vec<_> = names(&own).filter(|name| *name != LINE.as_bytes()).collect();
            let kept: Vec<_> = names(&merged).filter(|name| *name != LINE.as_bytes()).collect();
            prop_assert_eq!(others, kept);
        }
    }
}
