//! The kernels that the simulated GPU can run. They are identified by name, in any module image.
//!
//! | name | parameters | effect |
//! | --- | --- | --- |
//! | `fill_u32` | `u64 pointer, u64 count, u32 value` | sets every word |
//! | `add_u32` | `u64 pointer, u64 count, u32 increment` | adds to every word |
//! | `pattern_u32` | `u64 pointer, u64 count, u32 seed` | sets every word to a value that depends on its index and the seed |
//! | `check_u32` | `u64 pointer, u64 count, u32 seed, u32 scale, u32 add, u64 counter` | counts the words that differ from (pattern word of the seed) * scale + add |
//! | `spin_ms` | `u32 milliseconds` | keeps the stream busy |
//! | `affinode_digest` | `u64 table, u32 many` | see [`crate::digest`] |
//!
//! The test program `integration/clients/client.c` contains the first five kernels for real GPUs.
//! They have the same names, and the same effect in any launch configuration.

use std::time::Duration;

use crate::abi::{HostAddress, ILLEGAL_ADDRESS, INVALID_VALUE, NOT_FOUND, Outcome, pointer};
use crate::chunks::each_word;
use crate::digest;
use crate::driver::Driver;

/// A kernel that the simulated GPU can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    FillU32,
    AddU32,
    PatternU32,
    CheckU32,
    SpinMs,
    Digest,
}

/// A kernel with its arguments, ready to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Fill { pointer: u64, count: u64, value: u32 },
    Add { pointer: u64, count: u64, increment: u32 },
    Pattern { pointer: u64, count: u64, seed: u32 },
    Check { pointer: u64, count: u64, seed: u32, scale: u32, add: u32, counter: u64 },
    Spin { ms: u32 },
    Digest { table: u64, many: u32 },
}

/// Location of a kernel launch's arguments in memory.
#[derive(Debug, Clone, Copy)]
pub enum Arguments {
    /// An array of pointers, one per argument.
    Pointers(HostAddress),
    /// The arguments, laid out as a C structure of this size.
    Buffer(HostAddress, usize),
}

impl Kernel {
    /// Returns the simulated kernel with this entry name.
    pub fn named(name: &str) -> Outcome<Self> {
        match name {
            "fill_u32" => Ok(Self::FillU32),
            "add_u32" => Ok(Self::AddU32),
            "pattern_u32" => Ok(Self::PatternU32),
            "check_u32" => Ok(Self::CheckU32),
            "spin_ms" => Ok(Self::SpinMs),
            "affinode_digest" => Ok(Self::Digest),
            _ => Err(NOT_FOUND),
        }
    }

    /// Reads the kernel's arguments immediately, because they may become invalid after the launch.
    pub fn bind(self, arguments: Arguments) -> Outcome<Call> {
        Ok(match self {
            Self::FillU32 => Call::Fill {
                pointer: arguments.read(0, 0)?,
                count: arguments.read(1, 8)?,
                value: arguments.read(2, 16)?,
            },
            Self::AddU32 => Call::Add {
                pointer: arguments.read(0, 0)?,
                count: arguments.read(1, 8)?,
                increment: arguments.read(2, 16)?,
            },
            Self::PatternU32 => Call::Pattern {
                pointer: arguments.read(0, 0)?,
                count: arguments.read(1, 8)?,
                seed: arguments.read(2, 16)?,
            },
            Self::CheckU32 => Call::Check {
                pointer: arguments.read(0, 0)?,
                count: arguments.read(1, 8)?,
                seed: arguments.read(2, 16)?,
                scale: arguments.read(3, 20)?,
                add: arguments.read(4, 24)?,
                counter: arguments.read(5, 32)?,
            },
            Self::SpinMs => Call::Spin { ms: arguments.read(0, 0)? },
            Self::Digest => {
                Call::Digest { table: arguments.read(0, 0)?, many: arguments.read(1, 8)? }
            }
        })
    }
}

impl Arguments {
    fn read<T: Copy>(self, index: usize, offset: usize) -> Outcome<T> {
        let address = match self {
            // SAFETY: the application promises an array of pointers, one for each argument of the kernel.
            Self::Pointers(array) => unsafe { pointer::<HostAddress>(array) }.at(index),
            Self::Buffer(start, bytes) if offset + size_of::<T>() <= bytes => Some(start + offset),
            Self::Buffer(..) => None,
        };
        // SAFETY: the application promises that each pointer is valid for its argument of the
        // kernel.
        unsafe { pointer::<T>(address.ok_or(INVALID_VALUE)?) }.get().ok_or(INVALID_VALUE)
    }
}

impl Call {
    /// Executes the kernel. Called on the worker thread of a stream.
    pub fn run(self, driver: &Driver) -> Outcome {
        let words = |pointer, count: u64| {
            let bytes = count
                .checked_mul(4)
                .and_then(|bytes| usize::try_from(bytes).ok())
                .ok_or(ILLEGAL_ADDRESS)?;
            driver.memory().device(pointer, bytes)
        };
        match self {
            Self::Fill { pointer, count, value } => {
                each_word::<4>(&words(pointer, count)?, |_| value.to_ne_bytes());
            }
            Self::Add { pointer, count, increment } => {
                each_word::<4>(&words(pointer, count)?, |word| {
                    u32::from_ne_bytes(word).wrapping_add(increment).to_ne_bytes()
                });
            }
            Self::Pattern { pointer, count, seed } => {
                let mut index = 0;
                each_word::<4>(&words(pointer, count)?, |_| {
                    index += 1;
                    pattern(seed, index).to_ne_bytes()
                });
            }
            Self::Check { pointer, count, seed, scale, add, counter } => {
                let (mut index, mut wrong) = (0, 0_u64);
                each_word::<4>(&words(pointer, count)?, |word| {
                    index += 1;
                    let wanted = pattern(seed, index).wrapping_mul(scale).wrapping_add(add);
                    wrong += u64::from(u32::from_ne_bytes(word) != wanted);
                    word
                });
                each_word::<8>(&words(counter, 2)?, |before| {
                    u64::from_ne_bytes(before).wrapping_add(wrong).to_ne_bytes()
                });
            }
            Self::Spin { ms } => std::thread::sleep(Duration::from_millis(ms.into())),
            Self::Digest { table, many } => digest::run(driver, table, many)?,
        }
        Ok(())
    }
}

/// Returns one word of the pattern that `integration/clients/client.c` writes. The index is counted
/// from 1.
fn pattern(seed: u32, index: u64) -> u32 {
    let x = index.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.into());
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 27)) >> 16) as u32
}

/// Returns the kernel names in a PTX text, which follow `.entry`. Returns `None` if the image is
/// not PTX.
pub fn ptx_entries(image: &str) -> Option<Vec<String>> {
    if !image.contains(".version") {
        return None;
    }
    let names = image.split(".entry").skip(1).map(|rest| {
        let rest = rest.trim_start();
        let end = rest
            .find(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$'))
            .unwrap_or(rest.len());
        rest[..end].to_owned()
    });
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_from_ptx() {
        let ptx = ".version 6.0\n.visible .entry fill_u32(\n .param .u64 p)\n{ ret; }\n.entry spin_ms (.param .u32 m) {}";
        assert_eq!(ptx_entries(ptx).unwrap(), ["fill_u32", "spin_ms"]);
        assert_eq!(ptx_entries("\u{7f}ELF"), None);
    }

    #[test]
    fn arguments_come_as_pointers_or_as_a_buffer() {
        let buffer = [0x1000u64, 7, 9];
        let (p, n, v) = (0x1000u64, 7u64, 9u32);
        let array = [&raw const p as usize, &raw const n as usize, &raw const v as usize];
        let expected = Call::Add { pointer: 0x1000, count: 7, increment: 9 };
        assert_eq!(Kernel::AddU32.bind(Arguments::Pointers(array.as_ptr() as usize)), Ok(expected));
        assert_eq!(
            Kernel::AddU32.bind(Arguments::Buffer(buffer.as_ptr() as usize, 20)),
            Ok(expected)
        );
        assert_eq!(
            Kernel::AddU32.bind(Arguments::Buffer(buffer.as_ptr() as usize, 16)),
            Err(INVALID_VALUE)
        );
    }
}
