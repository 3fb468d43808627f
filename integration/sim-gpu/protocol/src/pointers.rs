//! Pointers that C callers pass to the libraries, with every dereference in this one place.

#![allow(unsafe_code, reason = "the arguments of a C interface are raw pointers")]

use std::ffi::{CStr, c_char};

use crate::code::INVALID_VALUE;

/// Where a function writes a result. Only a C caller makes one, and promises by the
/// contract of each function that it is null or valid for a write.
#[repr(transparent)]
pub struct Out<T>(*mut T);

// Derived, they would ask the same of T.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes; a null pointer is an invalid value.
    pub fn set(self, value: T) -> Result<(), i32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        self.set_if_wanted(value);
        Ok(())
    }

    /// Writes, unless the caller did not ask.
    pub fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid by the caller's promise; unaligned out of caution.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// The same place, for a value whose width another argument decides.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes the n-th of an array that the caller promises is long enough.
    pub fn set_at(self, index: usize, value: T) -> Result<(), i32> {
        Out(self.0.wrapping_add(index)).set(value)
    }
}

impl<T: Copy> Out<T> {
    /// What the caller put there, for a place that goes both ways.
    pub fn get(self) -> Option<T> {
        In(self.0.cast_const()).get()
    }
}

/// Where a function reads an argument from: null or valid, as with [`Out`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value, if there is one.
    pub fn get(self) -> Option<T> {
        // SAFETY: not null, so valid by the caller's promise; T is plain data.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// The n-th of an array that the caller promises is long enough.
    pub fn at(self, index: usize) -> Option<T> {
        if self.0.is_null() { None } else { In(self.0.wrapping_add(index)).get() }
    }

    /// The address, for a later read.
    pub fn address(self) -> usize {
        self.0 as usize
    }
}

/// A pointer that another structure holds, as sound as that structure's promise.
///
/// # Safety
/// `address` is null or valid for reads of `T`.
pub unsafe fn pointer<T>(address: usize) -> In<T> {
    In(address as *const T)
}

/// A C string: null or valid, as with [`In`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// As Rust text; null and invalid UTF-8 are an invalid value.
    pub fn get<'a>(self) -> Result<&'a str, i32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so a terminated string by the caller's promise, alive during the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| INVALID_VALUE)
    }
}
