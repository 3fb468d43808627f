//! Tests with sequences of frames and descriptors that an agent never sends.

use super::*;

/// Returns pseudo-random bytes, the same for each seed.
fn bytes(seed: u64, many: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..many).map(|_| next()).collect()
}

#[test]
fn hostile_sequences_hurt_no_other_process() {
    for seed in 0..60 {
        play(&bytes(seed, 400));
    }
}
