//! The disk file of one process. It contains encrypted pieces of the process's memory file, each at
//! the same offset as in the memory file.

use std::{
    collections::BTreeSet,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use aes_gcm::{AeadInPlace, Aes256Gcm, KeyInit};
use affinode_proto::wire::host_pool::{DISK_PIECE_BYTES, DiskKey, DiskTag, disk_nonce};

use crate::disk_folder::{DiskError, DiskFolder, NewFile};

/// Alignment in bytes that direct I/O needs.
const ALIGNMENT: usize = 4096;

/// Request of a process to write one piece of its memory file.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte of the piece.
    pub offset: u64,
    /// Size of the piece in bytes.
    pub bytes: u64,
    /// Key that the process has chosen.
    pub key: DiskKey,
}

/// Reason why a piece is not in the disk file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file would have more than the controller has allowed.
    #[error("the process may not store more than {allowed_bytes} bytes")]
    NotAllowed {
        /// Maximum size of the process's file in bytes.
        allowed_bytes: u64,
    },
    /// The maximum of all disk files is reached, or the file system is nearly full.
    #[error("the disk files have reached their maximum size, or the disk is nearly full")]
    Full,
    /// The piece cannot be read from memory or written to the disk.
    #[error("the piece cannot be written")]
    Io(#[from] io::Error),
    /// The piece cannot be encrypted.
    #[error("the piece cannot be encrypted")]
    Cipher,
}

/// A buffer for direct I/O, for one piece.
#[derive(Debug)]
struct PieceBuffer(Vec<u8>);

impl PieceBuffer {
    /// Allocates a buffer for the largest piece.
    fn new() -> PieceBuffer {
        PieceBuffer(vec![0; DISK_PIECE_BYTES as usize + ALIGNMENT])
    }

    /// Returns the first `bytes` aligned bytes.
    fn aligned(&mut self, bytes: usize) -> &mut [u8] {
        let skipped = self.0.as_ptr().align_offset(ALIGNMENT);
        &mut self.0[skipped..skipped + bytes]
    }
}

/// The disk file of one process.
#[derive(Debug)]
pub struct DiskFile {
    folder: Arc<DiskFolder>,
    files: NewFile,
    /// Offsets of the pieces that count as used.
    pieces: Mutex<BTreeSet<u64>>,
    /// Whether the process needs the content no more.
    is_closed: AtomicBool,
}

impl DiskFile {
    /// Creates an empty file.
    ///
    /// # Errors
    /// [`DiskError`] names the step that failed.
    pub fn create(folder: &Arc<DiskFolder>) -> Result<DiskFile, DiskError> {
        let files = folder.create()?;
        Ok(DiskFile {
            folder: Arc::clone(folder),
            files,
            pieces: Mutex::default(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Returns the descriptor for the process, which can only be read.
    pub fn readable(&self) -> BorrowedFd<'_> {
        self.files.readable.as_fd()
    }

    /// Records that the process needs the content no more. When this value is dropped, the file
    /// becomes empty, even if the process keeps its descriptor.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Encrypts a piece of the memory file, and writes it. The file may have at most
    /// `allowed_bytes`. Returns the authentication tag of the piece.
    ///
    /// # Errors
    /// [`StoreError`]: the piece is not in the file.
    pub fn store(
        &self,
        memory: BorrowedFd<'_>,
        piece: &Piece,
        allowed_bytes: u64,
    ) -> Result<DiskTag, StoreError> {
        let size = usize::try_from(piece.bytes.min(DISK_PIECE_BYTES)).unwrap_or_default();
        self.take(piece.offset, allowed_bytes)?;
        let mut buffer = PieceBuffer::new();
        let content = buffer.aligned(size);
        for_all(content.len(), |at| {
            rustix::io::pread(memory, &mut content[at..], piece.offset + at as u64)
        })?;
        let cipher = Aes256Gcm::new(&piece.key.into());
        let nonce = disk_nonce(piece.offset);
        let tag = cipher
            .encrypt_in_place_detached(&nonce.into(), b"", content)
            .map_err(|_| StoreError::Cipher)?;
        for_all(content.len(), |at| {
            rustix::io::pwrite(&self.files.writable, &content[at..], piece.offset + at as u64)
        })?;
        Ok(tag.into())
    }

    /// Counts a piece as used. Every piece counts with its maximum size.
    fn take(&self, offset: u64, allowed_bytes: u64) -> Result<(), StoreError> {
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if allowed_bytes == 0 {
            return Err(StoreError::NotAllowed { allowed_bytes });
        }
        if pieces.contains(&offset) {
            return Ok(());
        }
        let needed_bytes = (pieces.len() as u64 + 1) * DISK_PIECE_BYTES;
        if needed_bytes > allowed_bytes {
            return Err(StoreError::NotAllowed { allowed_bytes });
        }
        if !self.folder.take(DISK_PIECE_BYTES) {
            return Err(StoreError::Full);
        }
        pieces.insert(offset);
        Ok(())
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        let pieces = self.pieces.get_mut().unwrap_or_else(PoisonError::into_inner);
        let bytes = pieces.len() as u64 * DISK_PIECE_BYTES;
        let is_empty = self.is_closed.load(Ordering::Acquire)
            && rustix::fs::ftruncate(&self.files.writable, 0).is_ok();
        if is_empty || bytes == 0 {
            self.folder.give_back(bytes);
        } else {
            // The process may need the content.
            self.folder.give_back_when_closed(&self.files.writable, bytes);
        }
    }
}

/// Repeats a transfer that begins at an offset until all bytes are transferred.
fn for_all(
    bytes: usize,
    mut transfer: impl FnMut(usize) -> rustix::io::Result<usize>,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        match transfer(done) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => done += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
