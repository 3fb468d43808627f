//! Checks whether the preload library can be loaded in any container. If the dynamic loader cannot
//! load it, every process of the container ends.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use affinode_proto::paths;
use object::{
    Object, ObjectSymbol,
    elf::{self, FileHeader64},
    read::elf::{Dyn, ElfFile64, FileHeader},
};
use rustix::fs::StatVfsMountFlags;

use super::{CheckGroup, DoctorCheck};

/// Values that the check of the library examines.
#[derive(Clone, Debug)]
pub struct LibraryFacts {
    /// Path of the library.
    pub path: PathBuf,
    /// Whether a container's dynamic loader could load the library. The error is the reason why it
    /// could not.
    pub fault: Result<(), String>,
    /// Whether every user can read the library.
    pub readable: bool,
    /// Whether the library's file system is mounted noexec.
    pub no_exec: bool,
}

impl LibraryFacts {
    /// Reads the library, the modes of its file and its folder, and the mount options of its file
    /// system.
    #[must_use]
    pub fn gather(lib_dir: &Path) -> LibraryFacts {
        let path = lib_dir.join(paths::LIB_FILE);
        let fault = match fs::read(&path) {
            Ok(bytes) => loadable(&bytes),
            Err(error) => Err(error.to_string()),
        };
        let mode = |path: &Path| fs::metadata(path).map_or(0, |file| file.permissions().mode());
        let mounted = rustix::fs::statvfs(lib_dir);
        LibraryFacts {
            readable: mode(&path) & 0o004 != 0 && mode(lib_dir) & 0o001 != 0,
            no_exec: mounted.is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOEXEC)),
            path,
            fault,
        }
    }
}

/// Checks whether a library with this content can be loaded in every container image. It must be a
/// shared object for x86-64. It must require no other library and no symbol version. All its
/// undefined symbols must be weak.
///
/// # Errors
/// The rule that the file violates.
pub fn loadable(bytes: &[u8]) -> Result<(), String> {
    let unread = |error: object::Error| format!("the file is not an ELF file for x86-64: {error}");
    let file = ElfFile64::<object::Endianness>::parse(bytes).map_err(unread)?;
    let header: &FileHeader64<_> = file.elf_header();
    let endian = file.endian();
    if header.e_type(endian) != elf::ET_DYN || header.e_machine(endian) != elf::EM_X86_64 {
        return Err("the file is not a shared object for x86-64".into());
    }
    let table = file.elf_section_table();
    let dynamic = table.dynamic(endian, bytes).map_err(unread)?;
    let Some((entries, _)) = dynamic else {
        return Err("the file has no dynamic section".into());
    };
    for entry in entries {
        match entry.tag(endian) {
            elf::DT_NEEDED => return Err("the file depends on another library".into()),
            elf::DT_VERNEED => return Err("the file depends on a version of the C library".into()),
            _ => {}
        }
    }
    if !file.dynamic_symbols().any(|symbol| symbol.name() == Ok("dlsym") && !symbol.is_undefined())
    {
        return Err("the file is not Affinode's library, because it defines no dlsym".into());
    }
    let strong = file.dynamic_symbols().find(|symbol| symbol.is_undefined() && !symbol.is_weak());
    match strong {
        Some(symbol) => Err(format!("the file needs the symbol {}", symbol.name().unwrap_or("?"))),
        None => Ok(()),
    }
}

/// Returns the checks of the library.
#[must_use]
pub fn judge(facts: &LibraryFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("programs");
    let path = facts.path.display();
    if let Err(why) = &facts.fault {
        let hint = format!(
            "run affinode install, or put {} of the same release into {}",
            paths::LIB_FILE,
            folder(facts)
        );
        group.bad("library", format!("{path}: {why}"), hint);
    } else if facts.no_exec {
        let hint = format!(
            "the library's file system is mounted noexec: install the library in another folder and set {} in containerd's environment to that folder",
            paths::LIB_DIR_ENV
        );
        group.bad("library", format!("{path} cannot be mapped for execution"), hint);
    } else if facts.readable {
        group.good("library", format!("{path} can be loaded in any image"));
    } else {
        let hint = format!("run chmod a+rX on {} and on the library in it", folder(facts));
        group.bad("library", format!("some users cannot read {path}"), hint);
    }
    group.checks
}

fn folder(facts: &LibraryFacts) -> String {
    facts.path.parent().unwrap_or(&facts.path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::{super::CheckVerdict, *};

    #[test]
    fn an_unloadable_library_fails() {
        let good = LibraryFacts {
            path: "/lib/x.so".into(),
            fault: Ok(()),
            readable: true,
            no_exec: false,
        };
        let verdict = |facts: &LibraryFacts| judge(facts)[0].verdict;
        assert_eq!(verdict(&good), CheckVerdict::Good);
        assert_eq!(
            verdict(&LibraryFacts { fault: Err("needs x".into()), ..good.clone() }),
            CheckVerdict::Bad
        );
        assert_eq!(verdict(&LibraryFacts { readable: false, ..good.clone() }), CheckVerdict::Bad);
        assert_eq!(verdict(&LibraryFacts { no_exec: true, ..good }), CheckVerdict::Bad);
    }

    #[test]
    fn other_files_are_not_the_library() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(loadable(&own).unwrap_err(), "the file depends on another library");
        assert!(loadable(b"\x7fELF and nothing else").unwrap_err().contains("not an ELF file"));
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(judge(&LibraryFacts::gather(folder.path()))[0].verdict, CheckVerdict::Bad);
    }
}
