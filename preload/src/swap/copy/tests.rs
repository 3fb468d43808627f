use std::sync::MutexGuard;

use super::super::allocations::Allocation;
use super::super::backing::{back, property_on};
use super::super::copy_in::copy_in;
use super::super::fake_driver::{CONTEXT, DEVICE, Fake, Held, STACK_LIMIT};
use super::super::prefault::tests::{SHARED, forget_all, options};
use super::super::{addresses, locked};
use super::*;

mod early_release;

const PIECE_BYTES: u64 = 8 << 20;
const PIECES: usize = 3;

/// A process with some memory on the device, and without a copier.
struct World {
    fake: Fake,
    pieces: usize,
    _own: MutexGuard<'static, ()>,
}

impl World {
    fn new() -> World {
        World::with(PIECES, PIECE_BYTES)
    }

    fn with(pieces: usize, bytes: u64) -> World {
        let own = SHARED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let world = World { fake: Fake::new(), pieces, _own: own };
        SWAP.in_use.store(1, Ordering::Release);
        for content in 1..=pieces as u64 {
            world.allocate(bytes, content);
        }
        world
    }

    /// Allocates memory, and writes the same content to all of its slots.
    fn allocate(&self, bytes: u64, content: u64) -> u64 {
        let property = property_on(DEVICE);
        let mut piece =
            AllocationPiece { bytes, property, context: CONTEXT, ..AllocationPiece::default() };
        piece.address = addresses::reserve(bytes as usize).unwrap();
        piece.handle = back(&piece).unwrap();
        for address in (piece.address..piece.address + bytes).step_by(digest::SLOT_BYTES) {
            self.fake.write(address, content);
        }
        assert!(tables(|tables| tables.insert(Allocation {
            piece,
            asked_bytes: bytes,
            ..Allocation::default()
        })));
        piece.address
    }

    fn pieces(&self) -> Vec<AllocationPiece> {
        locked(|allocations| allocations.iter().map(|one| one.piece).collect())
    }

    /// Whether all memory is on the device, at the same addresses with the same contents, and the
    /// process holds no other object of the driver.
    fn is_resident(&self) -> bool {
        let right = |(n, piece): (usize, &AllocationPiece)| {
            piece.place == MemoryPlace::Device
                && self.fake.read(piece.address) == Some(n as u64 + 1)
        };
        self.pieces().iter().enumerate().all(right) && self.fake.held() == self.held(self.pieces)
    }

    fn is_copied_out(&self) -> bool {
        let offloaded = |piece: &AllocationPiece| piece.place == MemoryPlace::Pool;
        self.pieces().iter().all(offloaded) && self.fake.held() == self.held(0)
    }

    /// What the process holds if this number of its pieces is on the device.
    fn held(&self, many: usize) -> Held {
        Held { ranges: self.pieces, ..held(many) }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        forget_all();
    }
}

/// Returns the expected counts of driver objects while this number of pieces is mapped.
fn held(many: usize) -> Held {
    Held { handles: many, mappings: many, ranges: PIECES, descriptors: 0, streams: 0 }
}

#[test]
fn copied_out_content_is_restored() {
    let world = World::new();
    assert_eq!((copy_out(options(false, false), None), world.is_copied_out()), (Ok(()), true));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// An allocation must stay on the device if a driver call has created another reference to its
/// physical memory.
#[test]
fn allocation_with_other_holders_stays() {
    use super::super::alloc_wrappers::mem_get_handle_for_range;
    use super::super::vmm::mem_retain_handle;
    type CreateReference = fn(u64) -> u32;
    let ways: [CreateReference; 2] = [
        |address| {
            let mut handle = 0;
            // SAFETY: the address is that of a local variable.
            unsafe { mem_retain_handle(&raw mut handle, address) }
        },
        |address| {
            let mut handle = 0_u64;
            let at = (&raw mut handle).cast();
            // SAFETY: the address is that of a local variable.
            unsafe { mem_get_handle_for_range(at, address, PIECE_BYTES as usize, 1, 0) }
        },
    ];
    for way in ways {
        let world = World::new();
        let [first, shared, last] = world.pieces()[..] else { panic!("three pieces") };
        assert_eq!(way(shared.address), result::SUCCESS);
        for _ in 0..2 {
            assert_eq!(copy_out(options(true, false), None), Ok(()));
            let places = world.pieces().iter().map(|piece| piece.place).collect::<Vec<_>>();
            let (device, pool) = (MemoryPlace::Device, MemoryPlace::Pool);
            assert_eq!(places, [pool, device, pool]);
            assert_eq!(
                world.fake.read(shared.address),
                Some(2),
                "memory with another reference must stay on the device"
            );
            assert_eq!(world.fake.held().mappings, 1);
            assert_eq!(copy_in(None), Ok(()));
            let contents = [first, shared, last].map(|piece| world.fake.read(piece.address));
            assert_eq!(contents, [Some(1), Some(2), Some(3)]);
        }
    }
}

/// A block that the application has exported must stay on the device, because the importer has
/// mapped it.
#[test]
fn exported_block_stays() {
    use affinode_cuda_sys::{ACCESS_READ_WRITE, LOCATION_DEVICE, MemAccessDesc, POSIX_DESCRIPTOR};

    use super::super::driver::call;
    use super::super::vmm;
    let world = World::new();
    SWAP.wanted.store(1, Ordering::Release);
    let mut property = property_on(DEVICE);
    (property.handle_types, property.gpu_direct_rdma) = (POSIX_DESCRIPTOR, 0);
    let bytes = PIECE_BYTES as usize;
    let make = || {
        let (mut handle, mut address) = (0, 0);
        let access = MemAccessDesc {
            location_type: LOCATION_DEVICE,
            location_id: DEVICE,
            flags: ACCESS_READ_WRITE,
        };
        call!(mem_address_reserve(&raw mut address, bytes, 0, 0, 0));
        // SAFETY: the addresses are those of local variables.
        let codes = unsafe {
            [
                vmm::mem_create(&raw mut handle, bytes, &raw const property, 0),
                vmm::mem_map(address, bytes, 0, handle, 0),
                vmm::mem_set_access(address, bytes, &raw const access, 1),
            ]
        };
        assert_eq!(codes, [result::SUCCESS; 3]);
        world.fake.write(address, address);
        (handle, address)
    };
    let blocks = [make(), make()];
    let [(shared, kept), (_, other)] = blocks;
    let mut descriptor = -1_i32;
    // SAFETY: the address is that of a local variable.
    let code =
        unsafe { vmm::mem_export((&raw mut descriptor).cast(), shared, POSIX_DESCRIPTOR, 0) };
    assert_eq!(code, result::SUCCESS);
    for _ in 0..2 {
        assert_eq!(copy_out(options(true, false), None), Ok(()));
        assert_eq!(world.fake.read(kept), Some(kept), "the allocation never left the device");
        assert_eq!((world.fake.read(other), world.fake.held().mappings), (None, 1));
        assert_eq!(copy_in(None), Ok(()));
        assert_eq!((world.fake.read(kept), world.fake.read(other)), (Some(kept), Some(other)));
    }
    crate::sys::close(descriptor);
    SWAP.wanted.store(0, Ordering::Release);
    for (handle, address) in blocks {
        // SAFETY: the mapping and the handle were created above.
        let codes = unsafe { [vmm::mem_unmap(address, bytes), vmm::mem_release(handle)] };
        assert_eq!(codes, [result::SUCCESS; 2]);
    }
}

/// A context must count as broken only if its memory is copied out and its synchronisation returns
/// the same error code. The library must not query another context.
#[test]
fn context_is_broken_where_driver_confirms_code() {
    let world = World::new();
    assert!(!is_broken(result::OUT_OF_MEMORY), "nothing is copied out");
    assert_eq!(copy_out(options(false, false), None), Ok(()));
    assert!(!is_broken(result::OUT_OF_MEMORY) && is_broken(result::SUCCESS));
    world.fake.fail("cuCtxSynchronize", 0);
    assert!(is_broken(result::OUT_OF_MEMORY));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// If other processes use up host memory during a copy out, no memory may have left the device, the
/// host memory must be free again, and the next attempt must succeed.
#[test]
fn copy_stops_where_others_took_host_memory() {
    use super::super::host_pressure::tests::TAKEN_BY_OTHERS;
    let world = World::new();
    TAKEN_BY_OTHERS.store(u64::MAX / 2, Ordering::Relaxed);
    let ended = copy_out(options(true, false), None);
    TAKEN_BY_OTHERS.store(0, Ordering::Relaxed);
    assert_eq!(ended, Err(NO_HOST_MEMORY));
    assert!(world.is_resident() && !is_copied_out());
    assert_eq!((copy_out(options(true, false), None), world.is_copied_out()), (Ok(()), true));
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
}

/// If the controller cancels a copy out, because host memory is short at the limit of the pod, all
/// memory must stay on the device. The cancellation must apply only to this copy, so the next copy
/// out must succeed.
#[test]
fn copy_turned_back_by_controller_leaves_all() {
    use affinode_proto::wire::Phase;
    let world = World::new();
    crate::process::with_page(|page| {
        page.set_phase(Phase::CopyingOut);
        page.generation.store(1, Ordering::Relaxed);
        page.turn_back_for_test(1);
        assert_eq!(copy_out(options(true, false), None), Err(NO_HOST_MEMORY));
        assert!(world.is_resident() && !is_copied_out());
        page.generation.fetch_add(1, Ordering::Relaxed);
        assert_eq!((copy_out(options(true, false), None), world.is_copied_out()), (Ok(()), true));
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    });
}

/// The controller gives up an offload whose pages are present already. The copy out must be
/// cancelled nevertheless, and it must keep the pages for the next offload.
#[test]
fn copy_that_is_not_wanted_is_cancelled() {
    use affinode_proto::wire::{Phase, counters::NOT_WANTED};
    let world = World::new();
    crate::process::with_page(|page| {
        assert_eq!((copy_out(options(false, false), None), copy_in(None)), (Ok(()), Ok(())));
        let kept_bytes = with_pool(|pool| pool.kept_bytes());
        page.set_phase(Phase::CopyingOut);
        page.generation.store(2, Ordering::Relaxed);
        page.turn_back_for_test(2 | NOT_WANTED);
        assert_eq!(copy_out(options(false, false), None), Err(GIVEN_UP));
        assert!(world.is_resident() && !is_copied_out());
        assert_eq!(with_pool(|pool| pool.kept_bytes()), kept_bytes);
        page.generation.fetch_add(1, Ordering::Relaxed);
        assert_eq!((copy_out(options(false, false), None), world.is_copied_out()), (Ok(()), true));
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    });
}

/// If a driver call of a copy out fails, all memory must stay on the device, and the next attempt
/// must succeed. The test makes several functions fail, the copy function at each piece.
#[test]
fn failed_copy_out_leaves_all_on_the_device() {
    for call in ["cuStreamCreate", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"] {
        for which in 0..if call == "cuMemcpyDtoHAsync_v2" { PIECES } else { 1 } {
            let world = World::new();
            // Before the copies, the digests make one call of each of these functions.
            world.fake.fail(call, 1 + which);
            assert_eq!(
                copy_out(options(true, false), None),
                Err(result::OUT_OF_MEMORY),
                "{call}, {which}"
            );
            assert!(world.is_resident() && !is_copied_out(), "{call}, {which}");
            assert_eq!(
                (copy_out(options(true, false), None), world.is_copied_out()),
                (Ok(()), true)
            );
            assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{call}, {which}");
        }
    }
}

#[test]
fn failed_copy_in_is_repeated_from_the_pool() {
    let each_piece = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2"];
    let once = ["cuStreamCreate", "cuStreamSynchronize"];
    let calls = each_piece.iter().flat_map(|call| (0..PIECES).map(move |which| (*call, which)));
    for (call, which) in calls.chain(once.map(|call| (call, 0))) {
        let world = World::new();
        assert_eq!(copy_out(options(false, false), None), Ok(()));
        world.fake.fail(call, which);
        assert_eq!(copy_in(None), Err(result::OUT_OF_MEMORY), "{call}, {which}");
        assert!(!world.fake.is_still_to_fail() && world.is_copied_out(), "{call}, {which}");
        assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true), "{call}, {which}");
    }
}

/// After a failed restore, the local memory of the contexts must be released again, because the
/// next attempt may be much later.
#[test]
fn local_memory_leaves_with_the_copy() {
    let world = World::new();
    world.fake.hold_primary();
    assert_eq!(copy_out(options(false, false), None), Ok(()));
    assert_eq!(world.fake.stack_limit(CONTEXT), 0);
    for call in ["cuMemCreate", "cuCtxSetLimit"] {
        world.fake.fail(call, 0);
        assert_eq!(copy_in(None), Err(result::OUT_OF_MEMORY), "{call}");
        assert_eq!((world.fake.stack_limit(CONTEXT), world.is_copied_out()), (0, true), "{call}");
    }
    assert_eq!((copy_in(None), world.is_resident()), (Ok(()), true));
    assert_eq!(
        (world.fake.stack_limit(CONTEXT), local_memory::is_released()),
        (STACK_LIMIT, false)
    );
}

/// If a driver call of a copy in fails, the next attempt must succeed. It must also fill memory
/// that is still mapped, because the failed attempt could not unmap it.
#[test]
fn piece_that_stays_mapped_is_filled_next_time() {
    for call in ["cuMemSetAccess", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"] {
        for (which, unmap) in [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)] {
            let world = World::new();
            assert_eq!(copy_out(options(false, false), None), Ok(()));
            world.fake.fail(call, if call == "cuStreamSynchronize" { 0 } else { which });
            world.fake.fail("cuMemUnmap", unmap);
            assert_eq!(copy_in(None), Err(result::OUT_OF_MEMORY), "{call}, {which}, {unmap}");
            let again = (copy_in(None), world.is_resident());
            assert_eq!(again, (Ok(()), true), "{call}, {which}, {unmap}: {:?}", world.fake.held());
        }
    }
}

/// `tidy` must not wait for a context that is ending, because the end of a context waits for the
/// context's work, for any length of time.
#[test]
fn tidy_does_not_wait_for_an_ending_context() {
    let _world = World::new();
    let (tell, told) = std::sync::mpsc::channel();
    let told = SWAP.contexts_lock.hold(|| {
        std::thread::spawn(move || {
            prefault_ahead::tests::filling(PIECE_BYTES);
            let both = (tidy(false), prefault_ahead::go_on());
            prefault_ahead::tests::told_nothing();
            let _ = tell.send(both);
        });
        told.recv_timeout(std::time::Duration::from_secs(60))
    });
    assert_eq!(told, Ok((TrimResult::Kept, true)));
}

/// A process on which random steps are run, and the expected contents of its memory.
struct Model {
    world: World,
    pieces: Vec<(u64, Vec<u64>)>,
    random: u64,
}

impl Model {
    fn draw(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    fn write(&mut self, piece: usize, slot: usize, content: u64) {
        let (address, slots) = &mut self.pieces[piece];
        slots[slot] = content;
        self.world.fake.write(*address + (slot * digest::SLOT_BYTES) as u64, content);
    }

    /// Makes up to three random changes: writes to a part or all of a piece, adds a piece, or frees one.
    fn run(&mut self) {
        for _ in 0..self.draw(4) {
            let piece = self.draw(self.pieces.len() as u64) as usize;
            let many = self.pieces[piece].1.len();
            let content = self.draw(3);
            match self.draw(8) {
                0 if self.pieces.len() > 2 => {
                    let (address, _) = self.pieces.remove(piece);
                    let gone = locked(|table| table.remove_at(address)).unwrap();
                    super::super::alloc_wrappers::release(&gone.piece);
                }
                1 if self.pieces.len() < 9 => {
                    let slots = 1 + self.draw(16);
                    let address = self.world.allocate(slots * digest::SLOT_BYTES as u64, 0);
                    self.pieces.push((address, vec![0; slots as usize]));
                    let piece = self.pieces.len() - 1;
                    (0..slots as usize).for_each(|slot| self.write(piece, slot, content));
                }
                2 | 3 => (0..many).for_each(|slot| self.write(piece, slot, content)),
                _ => {
                    let slot = self.draw(many as u64) as usize;
                    self.write(piece, slot, content);
                }
            }
        }
    }

    /// Restores earlier contents: writes the contents of `before` to all pieces that existed then
    /// with the same size.
    fn go_back_to(&mut self, before: &[(u64, Vec<u64>)]) {
        for piece in 0..self.pieces.len() {
            let (address, slots) = self.pieces[piece].clone();
            let then =
                before.iter().find(|(known, then)| (*known, then.len()) == (address, slots.len()));
            for (slot, content) in then.iter().flat_map(|(_, then)| then.iter().enumerate()) {
                self.write(piece, slot, *content);
            }
        }
    }

    fn may_fail(&mut self, calls: &[&'static str]) {
        if self.draw(2) == 0 {
            let call = calls[self.draw(calls.len() as u64) as usize];
            let after = self.draw(6) as usize;
            self.world.fake.fail(call, after);
        }
    }

    fn is_right(&self) -> bool {
        self.pieces.iter().all(|(address, slots)| {
            slots.iter().enumerate().all(|(slot, content)| {
                let at = *address + (slot * digest::SLOT_BYTES) as u64;
                self.world.fake.read(at) == Some(*content)
            })
        })
    }
}

/// The contents must be correct after each restore, although content changes, stays, becomes zero
/// or moves between two offloads, and any step may fail.
#[test]
fn restore_with_stale_copy_preserves_contents() {
    const OUT: [&str; 8] = [
        "cuStreamCreate",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
        "cuMemHostRegister_v2",
        "cuModuleLoadData",
        "cuLaunchKernel",
        "cuMemAlloc_v2",
        "cuMemUnmap",
    ];
    const HOME: [&str; 8] = [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemcpyHtoDAsync_v2",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuMemHostRegister_v2",
        "cuMemUnmap",
    ];
    let (mut unchanged, mut zero, mut failed, mut partly) = (0, 0, 0, 0);
    for seed in 1..=8 {
        let world = World::new();
        let pieces = world.pieces();
        let mut model = Model { world, pieces: Vec::new(), random: seed << 32 | 0x9E37_79B9 };
        for piece in &pieces {
            model.pieces.push((piece.address, vec![0; piece.bytes as usize / digest::SLOT_BYTES]));
        }
        for piece in 0..model.pieces.len() {
            (0..model.pieces[piece].1.len()).for_each(|slot| model.write(piece, slot, 1));
        }
        let _controller = early_release::Controller::connect();
        for _ in 0..60 {
            let before = model.pieces.clone();
            model.run();
            model.may_fail(&OUT);
            let (keep, check) = (model.draw(4) > 0, model.draw(2) == 0);
            let release_early = model.draw(2) == 0;
            let how = CopyOptions { release_early, ..options(keep, check) };
            while copy_out(how, None).is_err() {
                failed += 1;
                if is_copied_out() {
                    assert!(release_early);
                    partly += 1;
                    assert_eq!(copy_in(None), Ok(()));
                }
                assert!(model.is_right() && !is_copied_out());
                model.go_back_to(&before);
            }
            (unchanged, zero) =
                (unchanged + super::super::unchanged_bytes(), zero + super::super::zero_bytes());
            model.world.fake.fail_no_more();
            model.may_fail(&HOME);
            while copy_in(None).is_err() {
                failed += 1;
            }
            model.world.fake.fail_no_more();
            assert!(model.is_right() && !is_copied_out());
            if model.draw(3) == 0 {
                while tidy(false) == TrimResult::Part {}
            }
        }
    }
    assert!(unchanged > 0 && zero > 0 && failed > 0, "{unchanged} {zero} {failed}");
    assert!(partly > 0, "no copy out has failed after it had released memory");
}
