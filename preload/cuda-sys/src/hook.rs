//! Properties of driver functions that the hook needs: a function's class and number, found by its
//! name.

/// Class of a driver function. It determines how the hook handles the function's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// Calls count as activity. They wait while the gate is closed.
    Work = 0,
    /// Calls query whether GPU work has ended. They count as polls and not as activity, because a
    /// framework polls even when it is idle. While the gate is closed, they request no restore.
    /// They wait until all work has ended, and then return success without a call into the driver.
    Poll = 1,
    /// Calls may allocate device memory. They wait while the gate is closed, and also while
    /// allocations are paused.
    Alloc = 2,
    /// Calls use managed memory. They are held like [`Class::Alloc`]. A successful call means that
    /// managed memory is in use.
    Managed = 3,
    /// Calls enable access between devices. A successful call means that peer access is in use.
    Peer = 4,
    /// Calls of `cuMemSetAccess`, which sets access rights to memory. If a successful call grants
    /// access to a device other than the memory's own, peer access is in use.
    Access = 5,
    /// Calls of `cuMemPoolSetAccess`. They are like [`Class::Access`], but for a memory pool.
    PoolAccess = 6,
    /// Calls share memory between processes. A successful call means that memory is shared with
    /// another process, or can be shared later. If the exporter were checkpointed, the driver would
    /// restore its memory as a separate copy, which is not shared with the importer.
    Import = 7,
    /// Calls concern contexts, captures, or memory that the library may copy. They are held and
    /// counted like [`Class::Work`]. The library has a wrapper for each of these functions.
    Memory = 8,
    /// Calls query attributes of an address. They pass if the library has no swappable memory
    /// (memory that it copies itself), because they return at once even while the process is
    /// checkpointed. Otherwise they wait while the gate is closed, because swappable memory has no
    /// attributes while it is copied out. They then count as polls.
    Pointer = 9,
    /// Calls wait for GPU work. They are handled like [`Class::Work`]. After such a call, the
    /// library releases memory that was freed in a stream. The calls need the slow path for this,
    /// and take it as soon as the process can have such memory.
    Sync = 10,
    /// Calls of `cuGetExportTable`, which returns the driver's private tables of functions.
    /// Requests for tables of the CUDA runtime and its libraries pass. Any other request is
    /// recorded as a hazard, and then held and counted like [`Class::Work`].
    Table = 11,
    /// Calls request a value that is constant for the life of the process. If an earlier result is
    /// cached, the call gets that result. Otherwise the call is held. Calls are counted like
    /// [`Class::Poll`].
    Constant = 12,
    /// Calls connect CUDA with another API, such as a graphics API. A successful call means that
    /// the other API may access memory of the process later. The calls do not show which memory.
    Interop = 13,
    /// Calls of `cuMemGetInfo`. They are handled like [`Class::Work`]. If the container has a VRAM
    /// limit, the library replaces the results.
    MemoryInfo = 14,
}

impl Class {
    /// Returns the class with this number.
    #[must_use]
    pub const fn from_u8(value: u8) -> Class {
        match value {
            1 => Class::Poll,
            2 => Class::Alloc,
            3 => Class::Managed,
            4 => Class::Peer,
            5 => Class::Access,
            6 => Class::PoolAccess,
            7 => Class::Import,
            8 => Class::Memory,
            9 => Class::Pointer,
            10 => Class::Sync,
            11 => Class::Table,
            12 => Class::Constant,
            13 => Class::Interop,
            14 => Class::MemoryInfo,
            _ => Class::Work,
        }
    }

    /// Whether calls of this class may allocate device memory or add a hazard. Such calls are also
    /// held while allocations are paused.
    #[must_use]
    pub const fn is_special(self) -> bool {
        !matches!(
            self,
            Class::Work
                | Class::Poll
                | Class::Memory
                | Class::Pointer
                | Class::Sync
                | Class::Table
                | Class::Constant
                | Class::MemoryInfo
        )
    }

    /// Whether the library must do more for calls of this class than count them. Such calls always
    /// take the slow path.
    #[must_use]
    pub const fn is_thorough(self) -> bool {
        !matches!(self, Class::Work | Class::Poll | Class::Sync)
    }
}

macro_rules! define_hooks {
    ($($class:ident { $($name:ident)* })*) => {
        /// The driver functions in the list of `hooked_functions`. Counters and messages identify a
        /// function's hook by the number `function as u32 + 1`. Number 0 stands for no function,
        /// and [`UNLISTED`] for every function outside of the list.
        #[allow(missing_docs, nonstandard_style)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Function { $($($name,)*)* }

        /// The names of all listed functions, each with a terminating zero. It is one string
        /// because a table of references would cost every process a relocation per name.
        const NAMES: &str = concat!($($(stringify!($name), "\0",)*)*);
        /// The number of listed functions.
        pub const COUNT: usize = [$($(Function::$name,)*)*].len();
        const SECTIONS: &[(Class, usize)] =
            &[$((Class::$class, [$(Function::$name,)*].len()),)*];
    };
}
crate::hooked_functions!(define_hooks);

/// Hook number that stands for all hooked functions that are not listed.
pub const UNLISTED: u32 = COUNT as u32 + 1;

const fn offsets() -> [u16; COUNT] {
    let names = NAMES.as_bytes();
    let mut offsets = [0; COUNT];
    let (mut index, mut at) = (1, 0);
    while index < COUNT {
        if names[at] == 0 {
            offsets[index] = (at + 1) as u16;
            index += 1;
        }
        at += 1;
    }
    offsets
}

static OFFSETS: [u16; COUNT] = offsets();

fn name_at(index: usize) -> &'static [u8] {
    let start = OFFSETS.get(index).map_or(0, |o| usize::from(*o));
    let end = OFFSETS.get(index + 1).map_or(NAMES.len(), |o| usize::from(*o));
    NAMES.as_bytes().get(start..end.saturating_sub(1)).unwrap_or(&[])
}

/// Returns the name of the function with this hook number, if it is listed.
#[must_use]
pub fn name(number: u32) -> Option<&'static str> {
    let index = (number as usize).checked_sub(1).filter(|i| *i < COUNT)?;
    core::str::from_utf8(name_at(index)).ok()
}

/// Returns number and class of the listed function with exactly this name.
#[must_use]
pub fn find(name: &[u8]) -> Option<(u32, Class)> {
    let mut start = 0;
    for &(class, count) in SECTIONS {
        let (mut low, mut high) = (start, start + count);
        while low < high {
            let middle = low.midpoint(high);
            match name_at(middle).cmp(name) {
                core::cmp::Ordering::Equal => return Some((middle as u32 + 1, class)),
                core::cmp::Ordering::Less => low = middle + 1,
                core::cmp::Ordering::Greater => high = middle,
            }
        }
        start += count;
    }
    None
}

/// Returns a function's name without the suffixes for its stream variant and version:
/// `cuMemcpyHtoD_v2_ptds` → `cuMemcpyHtoD`.
#[must_use]
pub fn base(name: &[u8]) -> &[u8] {
    let name = name.strip_suffix(b"_ptsz").or_else(|| name.strip_suffix(b"_ptds")).unwrap_or(name);
    match name {
        [rest @ .., b'_', b'v', digit] if digit.is_ascii_digit() => rest,
        _ => name,
    }
}

/// Whether calls of this function go directly to the driver. Two kinds of functions do. Functions
/// of the first kind belong to the checkpoint interface. Functions of the second kind touch no
/// context, and succeed at once even while the process is checkpointed. This was measured for each
/// function. For example, queries of device attributes succeed, but the query of a device's name
/// does not. The current context can be changed and queried even while a checkpoint or a restore is
/// running.
#[must_use]
pub fn passes(name: &[u8]) -> bool {
    let base = base(name);
    base.starts_with(b"cuCheckpoint")
        || matches!(
            base,
            b"cuDriverGetVersion"
                | b"cuGetErrorName"
                | b"cuGetErrorString"
                | b"cuGetProcAddress"
                | b"cuCtxGetCurrent"
                | b"cuCtxSetCurrent"
                | b"cuCtxPushCurrent"
                | b"cuCtxPopCurrent"
                | b"cuCtxGetDevice"
                | b"cuDeviceGetAttribute"
                // JAX queries all its streams every few seconds. Millions of calls in each state of
                // a checkpoint and at each step between them returned at once (driver 580).
                | b"cuStreamIsCapturing"
        )
}

/// Returns the hook number and class of a function that does not [pass](passes). If the function's
/// name is listed, they are those of the listed function. Otherwise they are those of the listed
/// function with the same base name. If that is not listed either, the class is derived from the
/// words in the name. Calls of an unknown function are held, because a call into the driver of a
/// checkpointed process could end the process.
#[must_use]
pub fn classify(name: &[u8]) -> (u32, Class) {
    if let Some(found) = find(name).or_else(|| find(base(name))) {
        return found;
    }
    const TAKES_MEMORY: [&[u8]; 7] = [
        b"Alloc",
        b"MemCreate",
        b"ArrayCreate",
        b"CtxCreate",
        b"PoolCreate",
        b"Load",
        b"GraphInstantiate",
    ];
    let takes_memory =
        TAKES_MEMORY.iter().any(|word| name.windows(word.len()).any(|part| part == *word));
    let class = if takes_memory { Class::Alloc } else { Class::Work };
    (UNLISTED, class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_found_under_its_number() {
        for index in 0..COUNT {
            let number = index as u32 + 1;
            let name = name(number).unwrap();
            assert_eq!(find(name.as_bytes()).map(|f| f.0), Some(number), "{name}");
            assert!(!passes(name.as_bytes()), "{name} is listed and passes");
        }
        assert_eq!(name(0), None);
        assert_eq!(name(UNLISTED), None);
    }

    #[test]
    fn the_list_knows_the_calls_that_matter() {
        for (name, class) in [
            ("cuCtxSynchronize", Class::Sync),
            ("cuMemFreeAsync_ptsz", Class::Memory),
            ("cuLaunchKernel_ptsz", Class::Work),
            ("cuStreamQuery", Class::Poll),
            ("cuEventQuery", Class::Poll),
            ("cuMemAlloc_v2", Class::Alloc),
            ("cuMemCreate", Class::Alloc),
            ("cuMemAllocManaged", Class::Managed),
            ("cuCtxEnablePeerAccess", Class::Peer),
            ("cuMemSetAccess", Class::Access),
            ("cuIpcOpenMemHandle_v2", Class::Import),
            // A process that opens such an event continues when this process has finished its work.
            ("cuIpcGetEventHandle", Class::Import),
            // Each of these functions returns a handle by which another process opens the memory.
            ("cuIpcGetMemHandle", Class::Import),
            ("cuMemExportToShareableHandle", Class::Import),
            ("cuMemGetHandleForAddressRange", Class::Import),
            ("cuMemPoolExportPointer", Class::Import),
            ("cuMemPoolExportToShareableHandle", Class::Import),
            ("cuEGLStreamProducerPresentFrame", Class::Interop),
            ("cuIpcCloseMemHandle", Class::Memory),
            ("cuMemMap", Class::Memory),
            ("cuMulticastBindMem", Class::Peer),
            ("cuGetExportTable", Class::Table),
            ("cuDeviceGetName", Class::Constant),
            ("cuDeviceGetCount", Class::Constant),
        ] {
            assert_eq!(find(name.as_bytes()).map(|f| f.1), Some(class), "{name}");
        }
    }

    #[test]
    fn unknown_names_are_held() {
        assert_eq!(classify(b"cuFrobnicate"), (UNLISTED, Class::Work));
        assert_eq!(classify(b"cuMemAllocOnMoon"), (UNLISTED, Class::Alloc));
        assert_eq!(classify(b"cuMemAlloc_v9").1, Class::Alloc);
        assert_eq!(classify(b"cuStreamQuery_v3_ptsz").1, Class::Poll);
    }

    #[test]
    fn variants_have_one_base() {
        for name in ["cuX", "cuX_v2", "cuX_ptds", "cuX_v3_ptsz"] {
            assert_eq!(base(name.as_bytes()), b"cuX", "{name}");
        }
        assert!(passes(b"cuDeviceGetAttribute"));
        assert!(!passes(b"cuDeviceGetName"), "returns 304 while the process is checkpointed");
        assert!(!passes(b"cuDeviceGetMemPool"));
        assert!(passes(b"cuStreamIsCapturing_ptsz") && !passes(b"cuStreamGetCaptureInfo"));
        assert!(passes(b"cuCtxSetCurrent") && passes(b"cuCtxPushCurrent_v2"));
        assert!(!passes(b"cuCtxSynchronize") && !passes(b"cuStreamQuery"));
    }
}
