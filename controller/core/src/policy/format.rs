//! Defines how values of settings are written in configuration files and annotations.

use std::fmt::Debug;

use serde::{Deserialize, Deserializer, de::Error as _};

use super::InvalidValue;
use crate::{Millis, window::Window};

/// Maximum of a duration in a setting: a year.
const MAX_DURATION_MS: Millis = 366 * 24 * 3600 * 1000;
/// Maximum of an amount of VRAM in a setting: a tebibyte.
const MAX_MIB: u64 = 1 << 20;

/// A form in which the values of a setting are written in configuration files and annotations.
pub trait Format {
    /// Type of the parsed value, which the controller's decisions use.
    type Value: Clone + Debug + PartialEq + Eq;
    /// Type of the value in a configuration file, before it is checked.
    type Written: for<'de> Deserialize<'de> + Debug;

    /// Parses the text of an annotation.
    ///
    /// # Errors
    /// [`InvalidValue`]: the text is not an accepted value. The error contains what would
    /// be accepted.
    fn parse(text: &str) -> Result<Self::Value, InvalidValue>;

    /// Checks and converts a value that was read from a configuration file.
    ///
    /// # Errors
    /// [`InvalidValue`]: the value is not accepted. The error contains what would be accepted.
    fn accept(written: &Self::Written) -> Result<Self::Value, InvalidValue>;

    /// Formats the value as configuration files write it.
    fn shown(value: &Self::Value) -> String;
}

/// A checked value that was read from a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileValue<F: Format>(pub F::Value);

impl<'de, F: Format> Deserialize<'de> for FileValue<F> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<FileValue<F>, D::Error> {
        let written = F::Written::deserialize(from)?;
        let refused = |accepted| D::Error::custom(format!("{written:?}: {accepted}"));
        F::accept(&written).map(FileValue).map_err(refused)
    }
}

pub(super) fn word<T: Copy>(text: &str, words: &[(&'static str, T)]) -> Result<T, InvalidValue> {
    let meaning = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
    meaning.ok_or_else(|| InvalidValue::Word(words.iter().map(|(word, _)| *word).collect()))
}

/// Form of a boolean value: `true` or `false`.
impl Format for bool {
    type Value = bool;
    type Written = bool;

    fn parse(text: &str) -> Result<bool, InvalidValue> {
        word(text, &[("true", true), ("false", false)])
    }

    fn accept(written: &bool) -> Result<bool, InvalidValue> {
        Ok(*written)
    }

    fn shown(value: &bool) -> String {
        value.to_string()
    }
}

/// Form of a duration, such as `90s`, `5m` or `1h 30m`. The value is in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Duration;

impl Format for Duration {
    type Value = Millis;
    type Written = String;

    fn parse(text: &str) -> Result<Millis, InvalidValue> {
        duration_ms(text)
    }

    fn accept(written: &String) -> Result<Millis, InvalidValue> {
        duration_ms(written)
    }

    fn shown(value: &Millis) -> String {
        humantime::format_duration(std::time::Duration::from_millis(*value)).to_string()
    }
}

/// Parses a duration such as `90s`, `5m` or `1h 30m` into milliseconds.
///
/// # Errors
/// [`InvalidValue`]: the duration is invalid.
pub fn duration_ms(value: &str) -> Result<Millis, InvalidValue> {
    let accepted = InvalidValue::Form("a duration from 1ms to 366days, such as 90s, 5m or 1h");
    humantime::parse_duration(value)
        .ok()
        .and_then(|duration| Millis::try_from(duration.as_millis()).ok())
        .filter(|ms| (1..=MAX_DURATION_MS).contains(ms))
        .ok_or(accepted)
}

/// Form of a duration that may also be `0`, which means never. The value is in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationOrNever;

impl Format for DurationOrNever {
    type Value = Millis;
    type Written = String;

    fn parse(text: &str) -> Result<Millis, InvalidValue> {
        let accepted = "a duration from 1ms to 366days, such as 90s, 5m or 1h, or 0 for never";
        match text {
            "0" => Ok(0),
            text => duration_ms(text).map_err(|_| InvalidValue::Form(accepted)),
        }
    }

    fn accept(written: &String) -> Result<Millis, InvalidValue> {
        DurationOrNever::parse(written)
    }

    fn shown(value: &Millis) -> String {
        if *value == 0 { "0".to_owned() } else { Duration::shown(value) }
    }
}

/// Form of a priority: a number from -1000 to 1000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priority;

impl Format for Priority {
    type Value = i32;
    type Written = i64;

    fn parse(text: &str) -> Result<i32, InvalidValue> {
        Priority::accept(&text.parse().unwrap_or(i64::MAX))
    }

    fn accept(written: &i64) -> Result<i32, InvalidValue> {
        let accepted = InvalidValue::Form("a whole number from -1000 to 1000");
        let number = i32::try_from(*written).ok();
        number.filter(|number| (-1000..=1000).contains(number)).ok_or(accepted)
    }

    fn shown(value: &i32) -> String {
        value.to_string()
    }
}

/// Form of an amount of memory that users write as a number of MiB. The parsed value is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mebibytes;

impl Format for Mebibytes {
    type Value = u64;
    type Written = i64;

    fn parse(text: &str) -> Result<u64, InvalidValue> {
        Mebibytes::accept(&text.parse().unwrap_or(i64::MAX))
    }

    fn accept(written: &i64) -> Result<u64, InvalidValue> {
        let accepted = InvalidValue::Form("a number of MiB, up to 1048576");
        let mib = u64::try_from(*written).ok();
        mib.filter(|mib| *mib <= MAX_MIB).map(|mib| mib << 20).ok_or(accepted)
    }

    fn shown(value: &u64) -> String {
        (value >> 20).to_string()
    }
}

/// Form of an amount of memory with its unit, such as `20Gi`. The parsed value is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity;

impl Quantity {
    /// Units, from the largest to the smallest, and the number of MiB in each.
    const UNITS: [(&'static str, u64); 3] = [("Ti", 1 << 20), ("Gi", 1 << 10), ("Mi", 1)];
}

impl Format for Quantity {
    type Value = u64;
    type Written = String;

    fn parse(text: &str) -> Result<u64, InvalidValue> {
        if text == "0" {
            return Ok(0);
        }
        let mib = Quantity::UNITS.iter().find_map(|(unit, mib)| {
            text.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(*mib)
        });
        mib.filter(|mib| (1..=MAX_MIB).contains(mib)).map(|mib| mib << 20).ok_or(
            InvalidValue::Form("an amount such as 20Gi or 512Mi, up to 1Ti, or 0 for no limit"),
        )
    }

    fn accept(written: &String) -> Result<u64, InvalidValue> {
        Quantity::parse(written)
    }

    fn shown(value: &u64) -> String {
        let mib = value >> 20;
        let whole = |(_, unit): &&(&str, u64)| mib.is_multiple_of(*unit);
        match Quantity::UNITS.iter().find(whole) {
            Some((unit, size)) if mib > 0 => format!("{}{unit}", mib / size),
            _ => "0".to_owned(),
        }
    }
}

/// Form of the times at which offloads are allowed: `always`, or times of the week in UTC.
impl Format for Window {
    type Value = Window;
    type Written = String;

    fn parse(text: &str) -> Result<Window, InvalidValue> {
        text.parse()
    }

    fn accept(written: &String) -> Result<Window, InvalidValue> {
        written.parse()
    }

    fn shown(value: &Window) -> String {
        value.to_string()
    }
}
