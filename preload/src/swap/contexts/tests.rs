use super::super::alloc_wrappers::mem_alloc;
use super::super::fake_driver::{self, CONTEXT};
use super::super::pending_work::tests::{OTHER, Process};
use super::super::pending_work::{GpuWork, wait};
use super::super::prefault::tests::{forget_all, options};
use super::super::{copy_in, copy_out, hook};
use super::*;
use crate::hook_table::HookEntry;
use crate::oom_wait;

const BYTES: usize = 4 << 20;
/// A context that is created later.
const LATER: usize = 0x99;

/// Test process with a second context, which is current and contains swappable memory. Its memory
/// is freed after the test.
struct World {
    process: Process,
}

impl World {
    fn new() -> World {
        let world = World { process: Process::new() };
        SWAP.in_use.store(1, Ordering::Release);
        SWAP.wanted.store(1, Ordering::Release);
        world.process.add_context(OTHER);
        world.process.fake.create_context(OTHER);
        let mut address = 0;
        // SAFETY: the address is that of a local variable.
        assert_eq!(unsafe { mem_alloc(&raw mut address, BYTES) }, result::SUCCESS);
        assert_eq!(world.swappable(), [OTHER]);
        world
    }

    /// The contexts of all swappable allocations.
    fn swappable(&self) -> Vec<usize> {
        locked(|table| table.iter().map(|one| one.piece.context).collect())
    }

    /// Waits for the work of all contexts, and copies all swappable memory to host memory. The fake
    /// driver ends the test if an ended context is used.
    fn offload(&self) {
        let done = || panic!("the work is done");
        assert_eq!(wait(done), GpuWork::Done);
        assert_eq!(copy_out(options(false, false), None), Ok(()));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        SWAP.wanted.store(0, Ordering::Release);
        forget_all();
    }
}

fn attach() {
    let mut context = 0;
    // SAFETY: the address is that of a local variable.
    assert_eq!(unsafe { ctx_attach(&raw mut context, 0) }, result::SUCCESS);
    assert_eq!(context, OTHER);
}

fn detach(context: usize) {
    // SAFETY: the argument is a number.
    assert_eq!(unsafe { ctx_detach(context) }, result::SUCCESS);
}

#[test]
fn detached_context_is_not_used_again() {
    let world = World::new();
    detach(OTHER);
    assert_eq!(world.swappable(), []);
    assert_eq!(world.process.fake.held().mappings, 0, "the library frees its memory");
    world.offload();
    assert_eq!(world.process.fake.awaited(), [CONTEXT]);
}

/// A context with a further reference still exists after `cuCtxDetach`, with all of its memory.
#[test]
fn attached_context_outlives_detach() {
    let world = World::new();
    attach();
    detach(OTHER);
    assert_eq!(world.swappable(), [OTHER]);
    detach(OTHER);
    assert_eq!(world.swappable(), []);
    world.offload();
}

/// The end of a context ends all references to it. The next context may have the same handle.
#[test]
fn destroyed_context_leaves_no_reference() {
    let world = World::new();
    attach();
    // SAFETY: the argument is a number.
    assert_eq!(unsafe { ctx_destroy(OTHER) }, result::SUCCESS);
    assert_eq!((world.swappable(), SWAP.attached.remove(OTHER)), (vec![], false));
}

/// If the library did not see a `cuCtxAttach`, a context may still exist after `cuCtxDetach`, or
/// not. Its memory must stay, and the library must not use the context again.
#[test]
fn unseen_attach_keeps_memory_at_detach() {
    for is_alive in [true, false] {
        let world = World::new();
        // Now chunks of the staging pool are registered in the context.
        world.offload();
        assert_eq!(copy_in(None), Ok(()));
        SWAP.in_use.store(0, Ordering::Release);
        let (number, _) = hook::find(b"cuCtxAttach").unwrap();
        super::super::stand_in(number, 0x4000_0000);
        SWAP.in_use.store(1, Ordering::Release);
        let mut attached = 0;
        if is_alive {
            assert_eq!(call!(ctx_attach(&raw mut attached, 0)), result::SUCCESS);
        }
        let held = world.process.fake.held();
        detach(OTHER);
        assert_eq!(world.swappable(), [0], "the piece stays on the device");
        assert_eq!(world.process.fake.held(), held, "nothing is freed");
        assert_eq!(wait(|| true), GpuWork::Unseen { may_end: false });
        world.process.fake.create_context(LATER);
        let mut address = 0;
        // SAFETY: the address is that of a local variable.
        assert_eq!(unsafe { mem_alloc(&raw mut address, BYTES) }, result::SUCCESS);
        let used = world.process.fake.pushed().len();
        assert_eq!(copy_out(options(false, false), None), Ok(()));
        assert_eq!(copy_in(None), Ok(()));
        assert!(!world.process.fake.pushed()[used..].contains(&OTHER));
    }
}

/// The arguments of a call are those of the function that the hook calls, although the hook may have
/// the name of an earlier version.
#[test]
fn device_of_new_context_is_read_by_version() {
    let _process = Process::new();
    let (number, class) = hook::find(b"cuCtxCreate").unwrap();
    let uuid_of = |real: usize| {
        let entry: &HookEntry = Box::leak(Box::new(HookEntry::exported(number, class)));
        assert_eq!(entry.resolve(|_| Some(real)), Some(real));
        // SAFETY: this function reads no memory at the arguments of a call that creates a context.
        unsafe { oom_wait::request(entry, &[0, 1, 2, 3, 4, 5]) }.map(|want| want.uuid)
    };
    let latest = fake_driver::function(b"cuCtxCreate_v4").unwrap();
    assert_eq!(uuid_of(latest), Some([3; 16]));
    assert_eq!(uuid_of(0x4000_0000), Some([2; 16]));
}
