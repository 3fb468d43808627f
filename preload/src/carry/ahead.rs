//! Host memory that is made ready while the process is home: its pages are there, and a vault has
//! registered them, so that the vault can copy out as soon as that is asked for.
//!
//! ```text
//! Nothing ──prepare──> Filling ──all pages are there──> Told ──the vault says so──> Ready
//!    ^                    │                               │                          │
//!    └──── not any more, no memory, the vault was left, pages were given back ───────┘
//! ```
//!
//! Nothing waits for it: who leaves before copies by itself, to what is there already.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use affinode_proto::wire::Notes;

use super::filling::FILLING;
use super::park::{assign, is_parked, tell_kept};
use super::pool::Pool;
use super::table::Place;
use super::{CARRY, is_in_use, shortage, vault, with_pool, with_pool_if_free};
use crate::{owned, process};

const NOTHING: u32 = 0;
const FILLING_PAGES: u32 = 1;
const TOLD: u32 = 2;
const READY: u32 = 3;

/// How far it is, and how much. Zero is nothing. The agent's alone.
#[repr(C)]
pub struct Ahead {
    state: AtomicU32,
    bytes: AtomicU64,
}

impl Ahead {
    /// Nothing.
    pub const fn none() -> Ahead {
        Ahead { state: AtomicU32::new(NOTHING), bytes: AtomicU64::new(0) }
    }

    fn is(&self, state: u32) -> bool {
        self.state.load(Ordering::Relaxed) == state
    }

    fn set(&self, state: u32) {
        self.state.store(state, Ordering::Relaxed);
    }
}

/// Begins, or no longer. Only once a vault was shown.
pub fn prepare(on: bool) {
    if !is_in_use() {
        return;
    }
    if !on {
        with_pool(Pool::end);
        vault::hang_up();
    } else if CARRY.ahead.is(NOTHING) && begin().is_none() {
        vault::hang_up();
    }
}

/// No longer, if at all.
pub fn end_preparation() {
    if is_on() {
        prepare(false);
    }
}

fn begin() -> Option<()> {
    owned::VAULT.get()?;
    if is_parked() {
        return None;
    }
    let bytes = with_pool(|pool| {
        let (bytes, context) = assign().filter(|(bytes, _)| *bytes > 0)?;
        let of_use = vault::summary(Place::Device).is_some();
        process::page()?.note(Notes::NO_VAULT, !of_use);
        of_use.then_some(())?;
        let missing = (bytes as u64).saturating_sub(pool.kept_bytes());
        (!shortage::would_be_near(missing) && pool.begin(bytes, context)).then_some(bytes)
    })?;
    CARRY.ahead.bytes.store(bytes as u64, Ordering::Relaxed);
    CARRY.ahead.set(FILLING_PAGES);
    Some(())
}

/// Does the next thing; true: soon again.
pub fn go_on() -> bool {
    if !CARRY.ahead.is(FILLING_PAGES) {
        return false;
    }
    if FILLING.is_busy() {
        // The application may have taken what was free at the beginning.
        if shortage::is_near() {
            FILLING.stop();
        }
        return true;
    }
    let bytes = CARRY.ahead.bytes.load(Ordering::Relaxed);
    let tell = |pool: &mut Pool| {
        pool.end();
        let there = pool.is_resident(bytes as usize);
        (there && vault::tell_ahead(pool, bytes).is_some(), pool.kept_bytes())
    };
    let Some((told, kept_bytes)) = with_pool_if_free(tell) else {
        return true;
    };
    if told {
        CARRY.ahead.set(TOLD);
    } else {
        vault::hang_up();
    }
    tell_kept(kept_bytes);
    false
}

/// Whether memory is there, or on its way, for the next time.
pub fn is_on() -> bool {
    !CARRY.ahead.is(NOTHING)
}

/// Whether the vault has the pool's file already.
pub fn is_told() -> bool {
    CARRY.ahead.is(TOLD) || CARRY.ahead.is(READY)
}

/// Nothing is filled any more, however far that is: somebody else is about to.
pub fn stop(pool: &mut Pool) {
    if CARRY.ahead.is(FILLING_PAGES) {
        pool.end();
        CARRY.ahead.set(NOTHING);
    }
}

/// Whether the vault can copy so much out now.
pub fn is_ready(bytes: u64) -> bool {
    if CARRY.ahead.is(TOLD) && vault::has_said_ready() {
        CARRY.ahead.set(READY);
    }
    CARRY.ahead.is(READY) && bytes <= CARRY.ahead.bytes.load(Ordering::Relaxed)
}

/// The vault was left.
pub fn is_over() {
    if is_in_use() {
        CARRY.ahead.set(NOTHING);
    }
}

/// Pages are about to be given back: what the vault has registered is not the pool's any more.
pub fn is_spoilt() {
    if is_told() {
        vault::hang_up();
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A vault was told of so much.
    pub fn told(bytes: u64) {
        CARRY.ahead.bytes.store(bytes, Ordering::Relaxed);
        CARRY.ahead.set(TOLD);
    }

    /// So much is being brought in.
    pub fn filling(bytes: u64) {
        CARRY.ahead.bytes.store(bytes, Ordering::Relaxed);
        CARRY.ahead.set(FILLING_PAGES);
    }

    /// Nobody was told of anything.
    pub fn told_nothing() {
        CARRY.ahead.set(NOTHING);
    }
}
