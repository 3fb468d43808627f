//! The file with the VRAM limit and the used VRAM of a container: one record of [`RECORD_BYTES`]
//! for each GPU. The controller writes the file into the container's mounted folder. The library
//! reads it in a program that uses NVML but not CUDA, such as `nvidia-smi`, because it has no
//! connection to the controller there.

use super::message::MAX_GPUS;

/// Size of a record in bytes.
pub const RECORD_BYTES: usize = 32;
/// Maximum size of the file in bytes.
pub const FILE_BYTES: usize = MAX_GPUS * RECORD_BYTES;

/// VRAM of a container on one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VramView {
    /// UUID of the GPU, as the driver reports it.
    pub uuid: [u8; 16],
    /// Limit of the container's VRAM on the GPU, in bytes.
    pub limit_bytes: u64,
    /// The container's used VRAM that counts toward the limit, in bytes.
    pub used_bytes: u64,
}

impl VramView {
    /// Encodes the record: UUID, limit and used VRAM, little endian.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let (uuid, sizes) = bytes.split_at_mut(16);
        uuid.copy_from_slice(&self.uuid);
        let (limit, used) = sizes.split_at_mut(8);
        limit.copy_from_slice(&self.limit_bytes.to_le_bytes());
        used.copy_from_slice(&self.used_bytes.to_le_bytes());
        bytes
    }

    /// Returns the record of a GPU in the content of a file. `None`: the file has none.
    #[must_use]
    pub fn find(file: &[u8], uuid: &[u8; 16]) -> Option<VramView> {
        file.chunks_exact(RECORD_BYTES).find_map(|record| {
            let (found, sizes) = record.split_first_chunk::<16>()?;
            let (limit, used) = sizes.split_first_chunk::<8>()?;
            let used = used.first_chunk::<8>()?;
            (found == uuid).then(|| VramView {
                uuid: *uuid,
                limit_bytes: u64::from_le_bytes(*limit),
                used_bytes: u64::from_le_bytes(*used),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_is_found_by_its_uuid() {
        let view =
            |n: u8| VramView { uuid: [n; 16], limit_bytes: u64::from(n) << 40, used_bytes: 3 };
        let mut file: Vec<u8> = [view(1), view(2)].iter().flat_map(VramView::encode).collect();
        assert_eq!(VramView::find(&file, &[2; 16]), Some(view(2)));
        assert_eq!(VramView::find(&file, &[3; 16]), None);
        file.truncate(RECORD_BYTES + 20);
        assert_eq!(VramView::find(&file, &[1; 16]), Some(view(1)));
        assert_eq!(VramView::find(&file, &[2; 16]), None, "the record is cut off");
    }
}
