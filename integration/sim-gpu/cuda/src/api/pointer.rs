//! Driver functions that describe an address.

use std::ffi::c_void;

use crate::abi::{ACCESS_READ_WRITE, CUdeviceptr, HostAddress, INVALID_VALUE, In, Out, Outcome};
use crate::api::cuda_api;
use crate::contexts::context_handle;
use crate::driver::Driver;
use crate::host::HostKind;
use crate::memory::Origin;

cuda_api! {
    Instant 4000 fn cuPointerGetAttribute(data: Out<c_void>, attribute: i32, address: CUdeviceptr) |d, _z| {
        Fact::of(d, attribute, address)?.ok_or(INVALID_VALUE)?.write(data)
    }
    Instant 7000 fn cuPointerGetAttributes(count: u32, attributes: In<i32>, data: In<HostAddress>, address: CUdeviceptr) |d, _z| {
        for index in 0..count as usize {
            let attribute = attributes.at(index).ok_or(INVALID_VALUE)?;
            let place = data.at(index).ok_or(INVALID_VALUE)?;
            // For an unknown address, this function writes zeros, but cuPointerGetAttribute fails.
            Fact::of(d, attribute, address)?.unwrap_or(Fact::zero(attribute)).write(place_for(place))?;
        }
        Ok(())
    }
    Work 6000 fn cuPointerSetAttribute(_value: In<c_void>, _attribute: i32, address: CUdeviceptr) |d, _z| {
        d.memory().describe(address).map(drop).ok_or(INVALID_VALUE)
    }
}

fn place_for(address: HostAddress) -> Out<c_void> {
    // SAFETY: Out is a transparent pointer. The application promises that each pointer is valid for
    // its attribute.
    unsafe { std::mem::transmute::<HostAddress, Out<c_void>>(address) }
}

/// Value of a pointer attribute, with the width that the driver interface defines.
#[derive(Clone, Copy)]
enum Fact {
    Word(u32),
    Byte(u8),
    Long(u64),
}

impl Fact {
    fn write(self, to: Out<c_void>) -> Outcome {
        match self {
            Self::Word(value) => to.cast().set(value),
            Self::Byte(value) => to.cast().set(value),
            Self::Long(value) => to.cast().set(value),
        }
    }

    fn zero(attribute: i32) -> Self {
        match attribute {
            2 | 6 | 9 => Self::Word(0),
            16 => Self::Word(0),
            8 | 10 | 13 | 15 => Self::Byte(0),
            _ => Self::Long(0),
        }
    }

    fn of(driver: &Driver, attribute: i32, address: CUdeviceptr) -> Outcome<Option<Self>> {
        const HOST: u32 = 1;
        const DEVICE: u32 = 2;
        let memory = driver.memory();
        if let Some(found) = memory.describe(address) {
            return Ok(Some(match attribute {
                1 if matches!(found.origin, Origin::Pool | Origin::Vmm) => Self::Long(0),
                1 => Self::Long(context_handle(found.context) as u64),
                2 => Self::Word(DEVICE),
                3 => Self::Long(address),
                6 => Self::Word(0),
                7 => Self::Long(found.object),
                8 => Self::Byte(0),
                9 => Self::Word(driver.ordinal(found.gpu) as u32),
                10 => Self::Byte(u8::from(found.origin == Origin::Alloc)),
                11 => Self::Long(found.base),
                12 => Self::Long(found.bytes),
                13 => Self::Byte(1),
                14 => Self::Long(memory.handle_types(found.object).into()),
                15 => Self::Byte(u8::from(memory.is_reached_by_others(found.object))),
                16 => Self::Word(ACCESS_READ_WRITE),
                17 => {
                    drop(memory);
                    Self::Long(driver.pools().of(found.base) as u64)
                }
                _ => return Err(INVALID_VALUE),
            }));
        }
        let Some((base, bytes, kind)) = memory.host.describe(address as HostAddress) else {
            return Ok(None);
        };
        Ok(Some(match attribute {
            2 => Self::Word(if kind == HostKind::Managed { DEVICE } else { HOST }),
            3 | 4 => Self::Long(address),
            8 => Self::Byte(u8::from(kind == HostKind::Managed)),
            11 => Self::Long(base as u64),
            12 => Self::Long(bytes as u64),
            13 => Self::Byte(1),
            1 | 6 | 7 | 9 | 10 => Self::zero(attribute),
            _ => return Err(INVALID_VALUE),
        }))
    }
}
