//! Decrypts pieces of content that the host pool has encrypted and written to a disk file
//! (AES-256-GCM, NIST SP 800-38D). The encryption is that of the crate `aes-gcm`. This library must
//! not contain code that can panic, which the crates for AES do. It therefore uses the processor's
//! instructions itself.

use core::arch::x86_64::{
    __m128i, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_aeskeygenassist_si128, _mm_cvtsi128_si64,
    _mm_set_epi64x, _mm_shuffle_epi32, _mm_slli_si128, _mm_unpackhi_epi64, _mm_xor_si128,
};

use affinode_proto::wire::host_pool::{DiskKey, DiskTag};
use ghash::universal_hash::{KeyInit, UniversalHash};
use ghash::{Block as HashBlock, GHash};

/// Sixteen bytes, in the order of the memory.
type Block = [u8; 16];

/// Number of blocks that are encrypted at once: the processor works on several at the same time.
const AT_ONCE: usize = 8;
const ROUND_KEYS: usize = 15;

/// Whether the processor has the instructions for AES.
pub fn is_supported() -> bool {
    const AES: u32 = 1 << 25;
    core::arch::x86_64::__cpuid(1).ecx & AES != 0
}

/// Decrypts a piece in place. False: the content is not what was encrypted with this key, nonce and
/// tag, or the processor cannot decrypt. The content is then undefined.
pub fn decrypt(key: &DiskKey, nonce: &[u8; 12], tag: &DiskTag, content: &mut [Block]) -> bool {
    // SAFETY: the processor has the instructions for AES.
    is_supported() && unsafe { decrypt_by_processor(key, nonce, tag, content) }
}

#[target_feature(enable = "aes")]
fn decrypt_by_processor(
    key: &DiskKey,
    nonce: &[u8; 12],
    tag: &DiskTag,
    content: &mut [Block],
) -> bool {
    let keys = expand(key);
    let [hash_key] = encrypt(&keys, [[0; 16]]);
    let mut hash = GHash::new(&HashBlock::from(hash_key));
    let bits = (content.len() as u64).wrapping_mul(128);
    // The counter 1 is that of the tag.
    let mut count = 2_u32;
    let (many, rest) = content.as_chunks_mut::<AT_ONCE>();
    for blocks in many {
        count = decrypt_blocks(&keys, &mut hash, nonce, count, blocks);
    }
    for block in rest {
        count = decrypt_blocks(&keys, &mut hash, nonce, count, core::array::from_mut(block));
    }
    let [first, second] = [0, bits].map(u64::to_be_bytes);
    let mut lengths = [0; 16];
    lengths.iter_mut().zip(first.iter().chain(&second)).for_each(|(to, from)| *to = *from);
    hash.update(&[HashBlock::from(lengths)]);
    let [mask] = encrypt(&keys, [counter(nonce, 1)]);
    let found = hash.finalize();
    let bytes = found.iter().zip(&mask).zip(tag);
    bytes.fold(0, |differs, ((found, mask), tag)| differs | (found ^ mask ^ tag)) == 0
}

/// Decrypts blocks from the counter `count` on, and adds their encrypted content to the hash.
/// Returns the next counter.
#[target_feature(enable = "aes")]
fn decrypt_blocks<const N: usize>(
    keys: &[__m128i; ROUND_KEYS],
    hash: &mut GHash,
    nonce: &[u8; 12],
    count: u32,
    blocks: &mut [Block; N],
) -> u32 {
    let masks: [Block; N] =
        encrypt(keys, core::array::from_fn(|n| counter(nonce, count.wrapping_add(n as u32))));
    hash.update(&blocks.map(HashBlock::from));
    for (block, mask) in blocks.iter_mut().zip(&masks) {
        *block = (u128::from_ne_bytes(*block) ^ u128::from_ne_bytes(*mask)).to_ne_bytes();
    }
    count.wrapping_add(N as u32)
}

/// Returns the block that is encrypted for a counter.
fn counter(nonce: &[u8; 12], count: u32) -> Block {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *nonce;
    let [m, n, o, p] = count.to_be_bytes();
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// Encrypts blocks with AES-256.
#[target_feature(enable = "aes")]
fn encrypt<const N: usize>(keys: &[__m128i; ROUND_KEYS], blocks: [Block; N]) -> [Block; N] {
    let [first, rounds @ .., last] = keys;
    let mut states = blocks.map(|block| _mm_xor_si128(load(block), *first));
    for key in rounds {
        states = states.map(|state| _mm_aesenc_si128(state, *key));
    }
    states.map(|state| store(_mm_aesenclast_si128(state, *last)))
}

/// Returns the keys of all rounds (FIPS 197, section 5.2).
#[target_feature(enable = "aes")]
fn expand(key: &DiskKey) -> [__m128i; ROUND_KEYS] {
    let (halves, _) = key.as_chunks::<16>();
    let half = |n: usize| load(halves.get(n).copied().unwrap_or_default());
    let (a, b) = (half(0), half(1));
    let (c, d) = next_pair::<1>(a, b);
    let (e, f) = next_pair::<2>(c, d);
    let (g, h) = next_pair::<4>(e, f);
    let (i, j) = next_pair::<8>(g, h);
    let (k, l) = next_pair::<16>(i, j);
    let (m, n) = next_pair::<32>(k, l);
    let (o, _) = next_pair::<64>(m, n);
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o]
}

/// Returns the two round keys that follow two round keys.
#[target_feature(enable = "aes")]
fn next_pair<const ROUND: i32>(first: __m128i, second: __m128i) -> (__m128i, __m128i) {
    let word = _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<ROUND>(second));
    let third = _mm_xor_si128(sums(first), word);
    let word = _mm_shuffle_epi32::<0xaa>(_mm_aeskeygenassist_si128::<0>(third));
    (third, _mm_xor_si128(sums(second), word))
}

/// Returns a vector in which each word is the sum (exclusive or) of all words up to it.
#[target_feature(enable = "aes")]
fn sums(words: __m128i) -> __m128i {
    let pairs = _mm_xor_si128(words, _mm_slli_si128::<4>(words));
    _mm_xor_si128(pairs, _mm_slli_si128::<8>(pairs))
}

#[target_feature(enable = "aes")]
fn load(block: Block) -> __m128i {
    let bits = u128::from_le_bytes(block);
    _mm_set_epi64x((bits >> 64) as i64, bits as i64)
}

#[target_feature(enable = "aes")]
fn store(bits: __m128i) -> Block {
    let (low, high) = (_mm_cvtsi128_si64(bits), _mm_cvtsi128_si64(_mm_unpackhi_epi64(bits, bits)));
    (u128::from(high.cast_unsigned()) << 64 | u128::from(low.cast_unsigned())).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use aes_gcm::{AeadInPlace, Aes256Gcm};

    use super::*;

    /// Content of the crate `aes-gcm`, for all lengths around the number of blocks at once.
    #[test]
    fn decrypted_content_is_what_was_encrypted() {
        for blocks in [0, 1, 7, 8, 9, 16, 259] {
            let key: DiskKey = core::array::from_fn(|n| (n * 7 + blocks) as u8);
            let nonce: [u8; 12] = core::array::from_fn(|n| (n * 31 + blocks) as u8);
            let clear: Vec<u8> = (0..blocks * 16).map(|n| ((n * n) >> 3) as u8).collect();
            let mut sealed = clear.clone();
            let cipher = <Aes256Gcm as aes_gcm::KeyInit>::new(&key.into());
            let tag: DiskTag =
                cipher.encrypt_in_place_detached(&nonce.into(), b"", &mut sealed).unwrap().into();
            let opened = |change: fn(&mut DiskKey, &mut [u8; 12], &mut DiskTag, &mut Vec<u8>)| {
                let (mut key, mut nonce, mut tag, mut sealed) = (key, nonce, tag, sealed.clone());
                change(&mut key, &mut nonce, &mut tag, &mut sealed);
                let right = decrypt(&key, &nonce, &tag, sealed.as_chunks_mut().0);
                right.then_some(sealed)
            };
            assert_eq!(opened(|_, _, _, _| ()), Some(clear), "{blocks} blocks");
            assert_eq!(opened(|key, _, _, _| key[31] ^= 1), None);
            assert_eq!(opened(|_, nonce, _, _| nonce[0] ^= 1), None);
            assert_eq!(opened(|_, _, tag, _| tag[15] ^= 128), None);
            if blocks > 0 {
                let last =
                    |_: &mut DiskKey, _: &mut [u8; 12], _: &mut DiskTag, all: &mut Vec<u8>| {
                        *all.last_mut().unwrap() ^= 1;
                    };
                assert_eq!(opened(last), None, "a changed byte is noticed");
            }
        }
    }
}
