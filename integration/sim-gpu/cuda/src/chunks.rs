//! Pieces of device or host memory on which copies and kernels work.

use std::sync::Arc;

use crate::abi::{HostAddress, INVALID_VALUE, Outcome};
use crate::pages::Pages;

/// A piece of memory. The memory stays valid while this value exists.
#[derive(Clone)]
pub struct Piece {
    address: usize,
    bytes: usize,
    _window: Option<Arc<Pages>>,
}

impl Piece {
    /// Returns a piece of device memory: a part of the mapping `window`. The piece keeps that
    /// mapping alive.
    pub fn of(window: Arc<Pages>, offset: usize, bytes: usize) -> Self {
        let bytes = bytes.min(window.bytes().saturating_sub(offset));
        Self { address: window.start() + offset, bytes, _window: Some(window) }
    }
}

/// Returns a piece of the application's host memory. The memory is assumed to be valid, because the
/// application passed its address to the driver.
pub fn host_piece(address: HostAddress, bytes: usize) -> Outcome<Vec<Piece>> {
    if address == 0 && bytes > 0 {
        return Err(INVALID_VALUE);
    }
    Ok(vec![Piece { address, bytes, _window: None }])
}

/// Copies the contents of these pieces into new memory. So the owner may change the source before
/// the copy operation runs.
pub fn snapshot(pieces: &[Piece]) -> Outcome<Vec<Piece>> {
    let bytes = pieces.iter().map(|piece| piece.bytes).sum();
    let pages = Arc::new(Pages::host(bytes)?);
    let copy = vec![Piece { address: pages.start(), bytes, _window: Some(pages) }];
    copy_pieces(&copy, pieces);
    Ok(copy)
}

/// Copies the contents of one list of pieces to another list of the same total size.
pub fn copy_pieces(to: &[Piece], from: &[Piece]) {
    let (mut to, mut from) = (to.iter(), from.iter());
    let (mut target, mut source) = (to.next().cloned(), from.next().cloned());
    while let (Some(t), Some(s)) = (&mut target, &mut source) {
        let bytes = t.bytes.min(s.bytes);
        // SAFETY: a piece is a window that it keeps mapped, or memory that the application passed
        // to this copy. By the copy's contract, such memory is valid for `bytes` until the copy is
        // done.
        unsafe { std::ptr::copy(s.address as *const u8, t.address as *mut u8, bytes) };
        for piece in [&mut *t, &mut *s] {
            piece.address += bytes;
            piece.bytes -= bytes;
        }
        if t.bytes == 0 {
            target = to.next().cloned();
        }
        if s.bytes == 0 {
            source = from.next().cloned();
        }
    }
}

/// Replaces each word of the memory by `change(word)`. `W` is the size of a word in bytes. The
/// length of every piece must be a multiple of `W`.
pub fn each_word<const W: usize>(pieces: &[Piece], mut change: impl FnMut([u8; W]) -> [u8; W]) {
    for piece in pieces {
        for offset in (0..piece.bytes / W * W).step_by(W) {
            let word = (piece.address + offset) as *mut [u8; W];
            // SAFETY: the word is inside the piece, which is a mapped window or memory that the
            // application passed.
            unsafe { word.write(change(word.read())) };
        }
    }
}
