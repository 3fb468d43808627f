//! Wrappers of the pointers that C callers pass to the libraries. Only this module dereferences
//! such pointers.

#![allow(unsafe_code, reason = "the arguments of a C interface are raw pointers")]

use std::ffi::{CStr, c_char};

use crate::code::INVALID_VALUE;

/// A pointer of a C caller through which a function writes a result. Only C callers create one. The
/// contract of each function requires that the pointer is null or valid for a write.
#[repr(transparent)]
pub struct Out<T>(*mut T);

// A derived implementation would require T to be Clone as well.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the value. Returns "invalid value" for a null pointer.
    pub fn set(self, value: T) -> Result<(), i32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        self.set_if_wanted(value);
        Ok(())
    }

    /// Writes the value, unless the pointer is null.
    pub fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid by the caller's promise; unaligned out of caution.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Converts the pointer to another type, for a value whose type depends on another argument of
    /// the call.
    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Writes element `index` of an array. The caller must provide an array of sufficient length.
    pub fn set_at(self, index: usize, value: T) -> Result<(), i32> {
        Out(self.0.wrapping_add(index)).set(value)
    }
}

impl<T: Copy> Out<T> {
    /// Reads the value that the pointer refers to, for a parameter that is both input and output.
    pub fn get(self) -> Option<T> {
        In(self.0.cast_const()).get()
    }
}

/// A pointer of a C caller from which a function reads an argument. It is null or valid, as with
/// [`Out`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads the value. Returns `None` for a null pointer.
    pub fn get(self) -> Option<T> {
        // SAFETY: not null, so valid by the caller's promise; T is plain data.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// Reads element `index` of an array. The caller must provide an array of sufficient length.
    pub fn at(self, index: usize) -> Option<T> {
        if self.0.is_null() { None } else { In(self.0.wrapping_add(index)).get() }
    }

    /// Returns the address as a number, so that the memory can be read later.
    pub fn address(self) -> usize {
        self.0 as usize
    }
}

/// Converts an address, which was read from a field of a structure, to a pointer. The pointer is
/// valid as long as the structure.
///
/// # Safety
/// `address` is null or valid for reads of `T`.
pub unsafe fn pointer<T>(address: usize) -> In<T> {
    In(address as *const T)
}

/// A C string of a C caller. It is null or valid, as with [`In`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// The text as a Rust string. Returns "invalid value" for a null pointer or invalid UTF-8.
    pub fn get<'a>(self) -> Result<&'a str, i32> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, so a terminated string by the caller's promise, alive during the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| INVALID_VALUE)
    }
}
