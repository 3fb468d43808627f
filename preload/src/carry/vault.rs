//! Home through a vault: another process makes and fills the memory while the driver restores
//! this one's context; here it is only imported and mapped.
//!
//! ```text
//! offer: parked, about to be checkpointed ──> the pool's file and the list of pieces, to the vault
//! announce: it is away, and the vault may register the pool; it is about to be restored, and the
//!        vault begins
//! take:  restored ──> Begin? ──> each Block: import, map ──> Filled ──> on the device
//!                        │ anything else, or too late
//!                        └──> what came is unmapped and released, the vault hung up on: the pool
//!                             has the content all along, and it is copied from there
//! ```
//!
//! One socket serves one absence. Nothing here is needed for a return: whoever has no vault
//! copies by itself.

use core::sync::atomic::{AtomicU32, Ordering};

use affinode_cuda_sys::{LOCATION_DEVICE, MemAllocationProp, POSIX_DESCRIPTOR, result};
use affinode_proto::wire::Notes;
use affinode_proto::wire::message::FRAME_BYTES;
use affinode_proto::wire::vault::{
    FromVault, LEAST_MEAN_BYTES, MOST_PIECES, PIECES_A_FRAME, Piece as Wire, ToVault,
};

use super::ahead;
use super::backing::{is_able, map, unback};
use super::driver::call;
use super::order::Order;
use super::park::{each, note};
use super::pool::Pool;
use super::table::{Id, Piece, Place};
use super::{tables, with_pool};
use crate::owned::{self, Owned};
use crate::page::Page;
use crate::process;
use crate::sys::{self, Descriptor, task};

/// A vault that fills began while the driver restored, and one that does not has hung up: its
/// word is there already, unless it is stopped.
const BEGIN_WITHIN_MS: u64 = 500;
/// How long the next block is waited for.
const BLOCK_WITHIN_MS: u64 = 2_000;
/// The slowest bus that is worth waiting for.
const BYTES_A_MS: u64 = 2_000_000;

/// 1: what is parked was handed over on the socket that there is.
static OFFERED: AtomicU32 = AtomicU32::new(0);

/// The controller has sent a way to a vault.
pub fn meet(socket: Option<Descriptor>) {
    hang_up();
    if let Some(socket) = socket {
        match Owned::note(socket.number()) {
            Some(owned) => {
                socket.take();
                owned::VAULT.set(owned);
            }
            None => drop(socket),
        }
    }
}

/// Leaves the vault, which lets go of everything then. What was on its way here is let go of,
/// too: a shareable handle keeps its memory for as long as it is anywhere.
pub fn hang_up() {
    if let Some(vault) = owned::VAULT.get() {
        // A forked child may have the socket as well.
        sys::shut_down(vault);
        while receive(0).is_some() {}
    }
    owned::VAULT.close();
    OFFERED.store(0, Ordering::Relaxed);
    ahead::is_over();
}

/// Hands what is parked over, where a vault can bring it home faster. Otherwise it is hung up on,
/// and the page says that the next one would not be of use.
pub fn offer(pool: &Pool, vram_bytes: u64) {
    let summary = summary(Place::Pool);
    if let Some(page) = process::page() {
        page.note(Notes::NO_VAULT, summary.is_none() || pool.is_sparse());
    }
    // What was left out of the pool, or is not in its file, no vault knows.
    let offered = summary
        .filter(|_| !pool.leaves_out() && !pool.is_shared())
        .and_then(|summary| tell_parked(pool, summary, is_off, vram_bytes));
    match offered {
        Some(()) => OFFERED.store(1, Ordering::Relaxed),
        None => hang_up(),
    }
}

/// The driver has taken the rest. What the vault says while the process is away its agent hears
/// at once.
pub fn announce_away() {
    if let Some(vault) = owned::VAULT.get() {
        let _ = sys::notify(vault, sys::gettid(), sys::SIGURG);
    }
    send(ToVault::Away, None);
}

/// Whether somebody waits for the process, or the controller has something to say.
fn is_wanted() -> bool {
    process::page().is_some_and(Page::has_waiters)
        || owned::SOCKET.get().is_some_and(|socket| task::wait_readable(socket, 0))
}

/// Does the next thing that the vault asks for while the process is away. True: there may be more.
pub fn hear() -> bool {
    let Some((message, file)) = receive(0) else {
        return false;
    };
    match (message, file) {
        (FromVault::Same { chunk }, file) => {
            let taken = file.is_some_and(|file| {
                with_pool(|pool| pool.share(chunk as usize, file.number(), is_wanted))
            });
            if send(ToVault::Mapped { chunk, taken }, None).is_none() {
                // It does not know where the content is.
                hang_up();
            }
        }
        // Later than it was of use.
        (FromVault::Ready, None) => {}
        _ => hang_up(),
    }
    true
}

/// The driver restores the process from now on.
pub fn announce_restore() {
    send(ToVault::Restoring, None);
}

/// Whether the vault can copy out, as far as it has said.
pub(super) fn has_said_ready() -> bool {
    matches!(receive(0), Some((FromVault::Ready, None)))
}

/// Hands the next piece over, and waits for room on the way.
pub(super) fn send_piece(shared: i32, end_us: u64) -> Option<()> {
    const PAUSE_US: u64 = 200;
    loop {
        match sys::send(owned::VAULT.get()?, &ToVault::Take.encode(), Some(shared)) {
            Ok(_) => return Some(()),
            Err(sys::EAGAIN | sys::ETOOMANYREFS) if sys::now_us() < end_us => {
                sys::sleep_us(PAUSE_US);
            }
            Err(_) => return None,
        }
    }
}

/// Waits until all of what was handed over is copied. False: that will not be, or somebody waits
/// for the process, which has it sooner as it is.
pub(super) fn has_copied(bytes: u64) -> bool {
    const SLICE_MS: u64 = 10;
    const ALMOST_MS: u64 = 500;
    let start_ms = sys::now_us() / 1_000;
    let copied = loop {
        let waited_ms = (sys::now_us() / 1_000).saturating_sub(start_ms);
        let wanted = process::page().is_some_and(Page::has_waiters);
        let over = waited_ms >= BLOCK_WITHIN_MS + bytes / BYTES_A_MS;
        let Some(vault) = owned::VAULT.get() else { break None };
        if over || (wanted && waited_ms >= ALMOST_MS) || task::wait_readable(vault, SLICE_MS) {
            break receive(0);
        }
    };
    let copied = matches!(copied, Some((FromVault::Copied, None)));
    OFFERED.store(u32::from(copied), Ordering::Relaxed);
    copied
}

/// Each time it is made sure anew that the number means our socket.
fn send(message: ToVault, descriptor: Option<i32>) -> Option<()> {
    sys::send(owned::VAULT.get()?, &message.encode(), descriptor).ok().map(drop)
}

/// Has the vault register the pool, in which nothing is yet.
pub(super) fn tell_ahead(pool: &Pool, bytes: u64) -> Option<()> {
    let (.., device) = summary(Place::Device)?;
    send(ToVault::Prepared { bytes, uuid: uuid_of(device)? }, Some(pool.file()?))
}

fn uuid_of(device: i32) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    (call!(device_get_uuid(&raw mut uuid, device)) == result::SUCCESS).then_some(uuid)
}

/// Lists the pieces that `which` picks: in the pool, or about to be.
pub(super) fn tell_parked(
    pool: &Pool,
    (pieces, bytes, device): Summary,
    which: fn(&Piece) -> bool,
    vram_bytes: u64,
) -> Option<()> {
    owned::VAULT.get()?;
    let file = pool.file()?;
    let uuid = uuid_of(device)?;
    let rest_bytes = vram_bytes.saturating_sub(bytes);
    // What was prepared it has already.
    let file = Some(file).filter(|_| !ahead::is_told());
    send(ToVault::Parked { bytes, rest_bytes, pieces, uuid }, file)?;
    let (mut many, mut words) = (0, [0; PIECES_A_FRAME]);
    let mut order = Order::of(which)?;
    for place in 0.. {
        let Some((_, piece)) = order.piece(place) else { break };
        if many == PIECES_A_FRAME {
            send(ToVault::Pieces { many: many as u32, words }, None)?;
            many = 0;
        }
        let rdma = piece.property.gpu_direct_rdma == 1;
        *words.get_mut(many)? = Wire { bytes: piece.bytes, rdma }.word()?;
        many += 1;
    }
    send(ToVault::Pieces { many: many as u32, words }, None)
}

fn is_off(piece: &Piece) -> bool {
    piece.place == Place::Pool
}

/// Number, bytes and device of what is parked.
pub(super) type Summary = (u32, u64, i32);

/// That, if a vault can make such memory: all of it in the
/// pool one behind the other, on one device, not too small, and nothing special. Least of all
/// something that the application may export: the driver does not export what was imported. What
/// it has not made itself can be exported by our choice alone, and stays at home once it was.
pub(super) fn summary(place: Place) -> Option<Summary> {
    let (mut many, mut end) = (0_u32, 0);
    let mut device = None;
    let mut order = match place {
        // What stays at home is not asked about.
        Place::Device => Order::of(Piece::leaves)?,
        _ => Order::of(|piece| piece.place != Place::Device)?,
    };
    while let Some((id, piece)) = order.piece(many as usize) {
        let property = piece.property;
        let plain = MemAllocationProp {
            location_id: property.location_id,
            gpu_direct_rdma: property.gpu_direct_rdma,
            ..MemAllocationProp::default()
        };
        let handle_types = match id {
            Id::Allocation(_) => 0,
            Id::Block(_) => property.handle_types,
        };
        let kind = MemAllocationProp { kind: 0, location_type: 0, handle_types, ..property };
        let fits = piece.place == place
            && piece.offset == end
            && kind == plain
            && property.location_type == LOCATION_DEVICE
            && device.is_none_or(|known| known == property.location_id)
            && is_able(property.location_id);
        if !fits {
            return None;
        }
        device = Some(property.location_id);
        many += 1;
        end += piece.bytes;
    }
    let large = end / u64::from(many.max(1)) >= LEAST_MEAN_BYTES;
    (large && many as usize <= MOST_PIECES).then_some((many, end, device?))
}

/// Takes everything home from the vault. False: nothing came, and everything is parked as before.
pub fn take() -> bool {
    if OFFERED.load(Ordering::Relaxed) == 0 {
        // Who turns round before its checkpoint has handed nothing over.
        hang_up();
        return false;
    }
    let all = take_all().is_some();
    hang_up();
    let mapped = |piece: &Piece| piece.place == Place::Mapped;
    each(mapped, |id, piece| {
        if all {
            note(id, piece.handle, Place::Device);
        } else if unback(piece) {
            note(id, 0, Place::Pool);
        }
        result::SUCCESS
    });
    all
}

fn take_all() -> Option<()> {
    send(ToVault::Restored, None)?;
    loop {
        match receive(BEGIN_WITHIN_MS)?.0 {
            FromVault::Begin => break,
            // Later than it was of use.
            FromVault::Ready | FromVault::Same { .. } => {}
            _ => return None,
        }
    }
    let mut order = Order::of(is_off)?;
    let mut index = 0;
    loop {
        let piece = order.piece(index as usize);
        let bytes = piece.map_or(0, |(_, piece)| piece.bytes);
        match (receive(BLOCK_WITHIN_MS + bytes / BYTES_A_MS)?, piece) {
            ((FromVault::Block { index: which }, Some(handle)), Some((id, piece)))
                if which == index =>
            {
                import(id, &piece, &handle)?;
                index += 1;
            }
            ((FromVault::Filled, None), None) => return Some(()),
            _ => return None,
        }
    }
}

fn receive(within_ms: u64) -> Option<(FromVault, Option<Descriptor>)> {
    if !task::wait_readable(owned::VAULT.get()?, within_ms) {
        return None;
    }
    let mut frame = [0; FRAME_BYTES];
    match sys::receive(owned::VAULT.get()?, &mut frame) {
        Ok((bytes, descriptor)) if bytes == frame.len() => {
            FromVault::decode(&frame).ok().map(|message| (message, descriptor))
        }
        _ => None,
    }
}

fn import(id: Id, piece: &Piece, shared: &Descriptor) -> Option<()> {
    let mut handle = 0;
    let number = usize::try_from(shared.number()).ok()?;
    let code = call!(mem_import(&raw mut handle, number, POSIX_DESCRIPTOR));
    let piece = Piece { imported: true, ..*piece };
    if code != result::SUCCESS || map(&piece, handle).is_err() {
        return None;
    }
    let noted = tables(|tables| {
        tables.piece(id).map(|known| {
            (known.handle, known.place, known.imported) = (handle, Place::Mapped, true);
        })
    });
    if noted.is_none() {
        // Nobody would undo it.
        unback(&Piece { handle, ..piece });
    }
    noted
}

#[cfg(test)]
#[path = "vault_tests.rs"]
mod tests;
