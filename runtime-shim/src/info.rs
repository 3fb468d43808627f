//! The shim's switch `-info`: prints the stock shim's RuntimeInfo under the name of this runtime.

use std::ffi::OsString;
use std::io::{self, Read};

use containerd_shim_protos::protobuf::{Message, well_known_types::any::Any};
use containerd_shim_protos::types::introspection::RuntimeInfo;

use crate::RUNTIME;
use crate::cli::ShimFlags;
use crate::options::{self, OptionsError};
use crate::runc_shim::{RuncShim, RuncShimError};

/// Maximum size of the input on stdin, equal to the stock shim's limit.
const STDIN_MAX_BYTES: u64 = 10 << 20;

/// Reason why `-info` failed.
#[derive(Debug, thiserror::Error)]
pub enum InfoError {
    /// stdin could not be read.
    #[error("cannot read the runtime options from stdin")]
    Stdin(#[source] io::Error),
    /// The options cannot be decoded or translated.
    #[error("cannot use the options of the runtime handler in containerd's configuration")]
    Options(#[from] OptionsError),
    /// The stock shim failed.
    #[error("cannot run the stock shim with -info")]
    Stock(#[from] RuncShimError),
    /// A message could not be decoded or encoded.
    #[error("cannot decode containerd's options or the stock shim's reply to -info")]
    Decode(#[from] protobuf::Error),
}

/// Runs the stock shim with `-info` and with translated options. Returns the bytes to print on
/// stdout.
pub fn info(flags: &ShimFlags, argv: &[OsString]) -> Result<Vec<u8>, InfoError> {
    let stdin = read_stdin().map_err(InfoError::Stdin)?;
    let stock = RuncShim::find(&flags.publish_binary)?;
    let (_, stdout) = stock.run(argv, &translate(&stdin)?)?;
    rename(&stdout)
}

/// Reads stdin to its end, up to [`STDIN_MAX_BYTES`].
pub fn read_stdin() -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::stdin().take(STDIN_MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn translate(stdin: &[u8]) -> Result<Vec<u8>, InfoError> {
    if stdin.is_empty() {
        return Ok(Vec::new());
    }
    let any = Any::parse_from_bytes(stdin)?;
    Ok(match options::translate(Some(&any), None)? {
        Some(translated) => translated.write_to_bytes()?,
        None => stdin.to_vec(),
    })
}

fn rename(stdout: &[u8]) -> Result<Vec<u8>, InfoError> {
    let mut info = RuntimeInfo::parse_from_bytes(stdout)?;
    info.name = RUNTIME.to_owned();
    Ok(info.write_to_bytes()?)
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::protobuf::MessageField;

    use super::*;

    #[test]
    fn only_the_name_changes() {
        let mut info = RuntimeInfo::new();
        info.name = "io.containerd.runc.v2".to_owned();
        info.annotations.insert("a".to_owned(), "b".to_owned());
        let mut features = Any::new();
        features.type_url =
            "types.containerd.io/opencontainers/runtime-spec/1/features/Features".to_owned();
        features.value = br#"{"ociVersionMax":"1.2.0"}"#.to_vec();
        info.features = MessageField::some(features);
        info.special_fields.mut_unknown_fields().add_varint(50, 1);
        let got = rename(&info.write_to_bytes().unwrap()).unwrap();
        info.name = RUNTIME.to_owned();
        assert_eq!(RuntimeInfo::parse_from_bytes(&got).unwrap(), info);
    }

    #[test]
    fn cri_options_are_translated() {
        let mut any = Any::new();
        any.type_url = "runtimeoptions.v1.Options".to_owned();
        let got = translate(&any.write_to_bytes().unwrap()).unwrap();
        let got = Any::parse_from_bytes(&got).unwrap();
        assert_eq!(got.type_url, options::RUNC_OPTIONS);
        assert_eq!(translate(b"").unwrap(), b"");
    }
}
