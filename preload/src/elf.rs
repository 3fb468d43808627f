//! Reads the ELF objects (program and libraries) that are loaded into this process: which object is
//! at an address, and which functions it defines.
//!
//! This library cannot use `dlsym`. That function takes the loader's lock, leaves an error for the
//! application's `dlerror`, and is itself hooked.

use core::ffi::{CStr, c_char, c_int, c_void};

use crate::libc;

/// A program header of an ELF object: `Elf64_Phdr` of the format.
#[repr(C)]
pub struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: u64,
    address: u64,
    physical: u64,
    file_bytes: u64,
    memory_bytes: u64,
    align: u64,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PF_EXECUTABLE: u32 = 1;

/// An entry of a symbol table: `Elf64_Sym` of the ELF format.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    bytes: u64,
}

/// A loaded ELF object (the program or a library), as the loader describes it.
pub struct LoadedObject<'a> {
    base: usize,
    /// Path of the object's file; empty for the main program.
    pub name: &'a [u8],
    headers: &'a [ProgramHeader],
}

impl LoadedObject<'_> {
    fn holds(&self, address: usize, flag: u32) -> bool {
        self.headers.iter().any(|header| {
            let start = self.base.wrapping_add(header.address as usize);
            header.kind == PT_LOAD
                && header.flags & flag == flag
                && address.wrapping_sub(start) < header.memory_bytes as usize
        })
    }

    /// Whether an address is inside the object.
    pub fn contains(&self, address: usize) -> bool {
        self.holds(address, 0)
    }

    /// Whether an address is inside the object's code.
    pub fn contains_code(&self, address: usize) -> bool {
        self.holds(address, PF_EXECUTABLE)
    }

    /// Begin and end address of the object's code. `None` if it has no code.
    pub fn code(&self) -> Option<core::ops::Range<usize>> {
        let is_code = |h: &&ProgramHeader| h.kind == PT_LOAD && h.flags & PF_EXECUTABLE != 0;
        let header = self.headers.iter().find(is_code)?;
        let start = self.base.wrapping_add(header.address as usize);
        Some(start..start.wrapping_add(header.memory_bytes as usize))
    }

    /// The tables to which the object's dynamic section points, if it has one.
    pub fn dynamic(&self) -> Option<DynamicSection> {
        let header = self.headers.iter().find(|h| h.kind == PT_DYNAMIC)?;
        let start = self.base.wrapping_add(header.address as usize);
        // SAFETY: the loader mapped this segment and keeps it while we iterate.
        unsafe { DynamicSection::read(self.base, start as *const [usize; 2]) }
    }

    /// Returns the address of the function of this name, if the object defines it.
    pub fn function(&self, name: &[u8]) -> Option<usize> {
        self.dynamic()?.function(name)
    }

    /// Returns address and size in bytes of the function of this name, if the object defines it.
    pub fn function_extent(&self, name: &[u8]) -> Option<(usize, usize)> {
        self.dynamic()?.function_extent(name)
    }
}

/// Calls `visit` with every loaded object in load order, until it returns true.
pub fn each_object<F: FnMut(&LoadedObject<'_>) -> bool>(mut visit: F) {
    unsafe extern "C" fn step<F: FnMut(&LoadedObject<'_>) -> bool>(
        info: *const libc::PhdrInfo,
        _size: usize,
        data: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid description, and our own `data` back.
        let (info, visit) = unsafe { (&*info, &mut *data.cast::<F>()) };
        let name = if info.name.is_null() {
            &[]
        } else {
            // SAFETY: the loader's copy of the path, which ends with a zero byte.
            unsafe { CStr::from_ptr(info.name) }.to_bytes()
        };
        let headers = if info.headers.is_null() {
            &[]
        } else {
            // SAFETY: the object's program headers, mapped while we iterate.
            unsafe { core::slice::from_raw_parts(info.headers, usize::from(info.header_count)) }
        };
        c_int::from(visit(&LoadedObject { base: info.base, name, headers }))
    }
    // SAFETY: `step::<F>` is called with `visit`, which outlives the iteration.
    unsafe { libc::iterate_objects(step::<F>, (&raw mut visit).cast()) };
}

/// Calls `select` with every loaded object in load order. Returns the first result that is not
/// `None`.
pub fn find<T>(mut select: impl FnMut(&LoadedObject<'_>) -> Option<T>) -> Option<T> {
    let mut found = None;
    each_object(|object| {
        found = select(object);
        found.is_some()
    });
    found
}

/// Whether a loaded object is this library itself.
pub fn is_own(object: &LoadedObject<'_>) -> bool {
    object.contains(is_own as *const () as usize)
}

/// Returns the address of the first function of this name in the loaded objects, this library
/// excluded.
pub fn find_function(name: &[u8]) -> Option<usize> {
    find(|object| if is_own(object) { None } else { object.function(name) })
}

/// The tables of an object to which its dynamic section points, such as the symbol table.
pub struct DynamicSection {
    base: usize,
    symbols: *const Symbol,
    strings: *const c_char,
    gnu_hash: *const u32,
    sysv_hash: *const u32,
    versions: *const u16,
    soname: Option<usize>,
}

impl DynamicSection {
    /// Reads the tables to which a dynamic section points.
    ///
    /// # Safety
    /// `entry` must point to the dynamic section of an object loaded at `base`, which
    /// must stay mapped as long as the result is used.
    pub unsafe fn read(base: usize, mut entry: *const [usize; 2]) -> Option<DynamicSection> {
        const DT_NULL: usize = 0;
        const DT_HASH: usize = 4;
        const DT_STRTAB: usize = 5;
        const DT_SYMTAB: usize = 6;
        const DT_SONAME: usize = 14;
        const DT_GNU_HASH: usize = 0x6fff_fef5;
        const DT_VERSYM: usize = 0x6fff_fff0;
        // glibc has added the base to these pointers in place. musl and the kernel's vDSO have not.
        let pointer = |value: usize| {
            if value < base { value.wrapping_add(base) } else { value }
        };
        let mut dynamic = DynamicSection {
            base,
            symbols: core::ptr::null(),
            strings: core::ptr::null(),
            gnu_hash: core::ptr::null(),
            sysv_hash: core::ptr::null(),
            versions: core::ptr::null(),
            soname: None,
        };
        loop {
            // SAFETY: the section ends with DT_NULL, at which the loop stops.
            let [tag, value] = unsafe { entry.read() };
            match tag {
                DT_NULL => break,
                DT_HASH => dynamic.sysv_hash = pointer(value) as *const u32,
                DT_STRTAB => dynamic.strings = pointer(value) as *const c_char,
                DT_SYMTAB => dynamic.symbols = pointer(value) as *const Symbol,
                DT_SONAME => dynamic.soname = Some(value),
                DT_GNU_HASH => dynamic.gnu_hash = pointer(value) as *const u32,
                DT_VERSYM => dynamic.versions = pointer(value) as *const u16,
                _ => {}
            }
            // SAFETY: this entry is not DT_NULL, so another entry follows.
            entry = unsafe { entry.add(1) };
        }
        let usable = !dynamic.symbols.is_null() && !dynamic.strings.is_null();
        usable.then_some(dynamic)
    }

    /// The object's `DT_SONAME`, if it has one.
    pub fn soname(&self) -> Option<&[u8]> {
        self.soname.map(|offset| self.string(offset))
    }

    fn string(&self, offset: usize) -> &[u8] {
        // SAFETY: this offset into the object's string table is from the object itself.
        unsafe { CStr::from_ptr(self.strings.add(offset)) }.to_bytes()
    }

    /// Returns the address of the function of this name, if the object defines it. Only the
    /// function's default version counts.
    pub fn function(&self, name: &[u8]) -> Option<usize> {
        self.function_extent(name).map(|(address, _)| address)
    }

    /// Returns address and size in bytes of the function of this name, if the object defines it.
    /// Only the function's default version counts.
    pub fn function_extent(&self, name: &[u8]) -> Option<(usize, usize)> {
        if self.gnu_hash.is_null() {
            self.function_by_sysv_hash(name)
        } else {
            self.function_by_gnu_hash(name)
        }
    }

    fn accept(&self, index: usize, name: &[u8]) -> Option<(usize, usize)> {
        const STT_FUNC: u8 = 2;
        const VERSION_HIDDEN: u16 = 0x8000;
        // SAFETY: an index from the object's own hash table.
        let symbol = unsafe { &*self.symbols.add(index) };
        if symbol.section == 0
            || symbol.info & 15 != STT_FUNC
            || self.string(symbol.name as usize) != name
        {
            return None;
        }
        // SAFETY: a table of versions has an entry per symbol.
        if !self.versions.is_null() && unsafe { *self.versions.add(index) } & VERSION_HIDDEN != 0 {
            return None;
        }
        Some((self.base.wrapping_add(symbol.value as usize), symbol.bytes as usize))
    }

    fn function_by_gnu_hash(&self, name: &[u8]) -> Option<(usize, usize)> {
        let hash = gnu_hash(name);
        // SAFETY: all reads follow the layout of the table that the loader itself uses:
        // four words, the bloom filter, the buckets, then a chain per bucket whose last
        // link is odd.
        unsafe {
            let [buckets, first, bloom_words] =
                [0, 1, 2].map(|word| *self.gnu_hash.add(word) as usize);
            if buckets == 0 {
                return None;
            }
            let bucket_at = self.gnu_hash.add(4 + 2 * bloom_words);
            let mut index = *bucket_at.add(hash as usize % buckets) as usize;
            if index < first {
                return None;
            }
            let chain = bucket_at.add(buckets);
            loop {
                let link = *chain.add(index - first);
                if link | 1 == hash | 1
                    && let Some(found) = self.accept(index, name)
                {
                    return Some(found);
                }
                if link & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    fn function_by_sysv_hash(&self, name: &[u8]) -> Option<(usize, usize)> {
        if self.sysv_hash.is_null() {
            return None;
        }
        // SAFETY: the layout of the table that the loader itself uses: two counts, the
        // buckets, then chains of indices that end with 0.
        unsafe {
            let buckets = *self.sysv_hash as usize;
            if buckets == 0 {
                return None;
            }
            let bucket = sysv_hash(name) as usize % buckets;
            let mut index = *self.sysv_hash.add(2 + bucket) as usize;
            while index != 0 {
                if let Some(found) = self.accept(index, name) {
                    return Some(found);
                }
                index = *self.sysv_hash.add(2 + buckets + index) as usize;
            }
        }
        None
    }
}

fn gnu_hash(name: &[u8]) -> u32 {
    name.iter().fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

fn sysv_hash(name: &[u8]) -> u32 {
    name.iter().fold(0, |hash: u32, byte| {
        let sum = (hash << 4).wrapping_add(u32::from(*byte));
        let high = sum & 0xf000_0000;
        (sum ^ (high >> 24)) & !high
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_functions_of_libc_by_both_tables() {
        let address = find_function(b"pthread_create").unwrap();
        let by_sysv = find(|object| {
            let mut dynamic = object.dynamic().filter(|_| object.contains(address))?;
            dynamic.gnu_hash = core::ptr::null();
            Some((dynamic.sysv_hash.is_null(), dynamic.function(b"pthread_create")))
        });
        let (absent, found) = by_sysv.unwrap();
        assert!(absent || found == Some(address));
        assert!(find(|object| object.contains_code(address).then_some(())).is_some());
        assert_eq!(find_function(b"no_such_function_anywhere"), None);
    }

    #[test]
    fn sonames_are_read() {
        let libc = find(|object| {
            let dynamic = object.dynamic()?;
            (dynamic.soname()? == b"libc.so.6").then_some(())
        });
        assert!(libc.is_some());
    }
}
