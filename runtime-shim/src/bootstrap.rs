//! Input and output of the shim's command `start`: what containerd writes to stdin and what it
//! reads from stdout. Both forms differ between versions of containerd. The reply to containerd has
//! the same form as the stock shim's reply.
//!
//! | containerd | stdin | stdout |
//! | --- | --- | --- |
//! | 1.6, 1.7 | `Any` with options, or nothing | address |
//! | 2.0-2.2 | `Any` with options, or nothing | JSON with version, address, protocol |
//! | 2.3 | `BootstrapParams` | `BootstrapResult` |

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::{Message, well_known_types::any::Any};
use serde_json::Value;

use crate::options::{self, OptionsError};

/// Input of `start`: bytes that containerd wrote to stdin.
#[derive(Clone, Debug, PartialEq)]
pub enum BootstrapInput {
    /// stdin was empty: there are no options.
    Nothing,
    /// Runtime options as containerd 1.6 to 2.2 send them.
    Options(Any),
    /// The whole invocation as a message, from containerd 2.3 on.
    Bootstrap(BootstrapParams),
    /// An unknown form, of a newer version of containerd. It is passed on unchanged.
    Unknown(Vec<u8>),
}

/// Reply that the stock shim's `start` writes to stdout.
#[derive(Clone, Debug, PartialEq)]
pub enum BootstrapReply {
    /// Only the address, as for containerd 1.6 and 1.7.
    Plain(String),
    /// JSON with version, address and protocol, as for containerd 2.0 to 2.2.
    Json(Value),
    /// Protobuf message, as for containerd 2.3.
    Bootstrap(BootstrapResult),
}

/// Error: the stock shim's reply has none of the known forms.
#[derive(Debug, thiserror::Error)]
#[error(
    "containerd-shim-runc-v2 start printed {0:?}. This output has no address that this version of \
     Affinode can parse"
)]
pub struct BootstrapReplyError(String);

impl BootstrapInput {
    /// Detects the form of the input. The bytes of an `Any` also decode as `BootstrapParams`, with
    /// the type URL as the id. The bytes are therefore taken as `BootstrapParams` only if their
    /// namespace and id equal those of the command line.
    #[must_use]
    pub fn parse(bytes: &[u8], namespace: &str, id: &str) -> BootstrapInput {
        if bytes.is_empty() {
            return BootstrapInput::Nothing;
        }
        if let Ok(params) = BootstrapParams::parse_from_bytes(bytes)
            && params.instance_id == id
            && params.namespace == namespace
        {
            return BootstrapInput::Bootstrap(params);
        }
        match Any::parse_from_bytes(bytes) {
            Ok(any) => BootstrapInput::Options(any),
            Err(_) => BootstrapInput::Unknown(bytes.to_vec()),
        }
    }

    /// Encodes the input again, with options that the stock shim accepts. Also returns the cgroup
    /// that the options choose for the shim.
    pub fn translate(
        self,
        cgroups_path: Option<&str>,
    ) -> Result<(Vec<u8>, Option<String>), OptionsError> {
        let encode = |message: &dyn Fn() -> protobuf::Result<Vec<u8>>| {
            message().map_err(|source| OptionsError::Decode { kind: "start", source })
        };
        match self {
            // Without input there are no options to translate.
            BootstrapInput::Nothing => Ok((Vec::new(), None)),
            BootstrapInput::Unknown(bytes) => Ok((bytes, None)),
            BootstrapInput::Options(any) => {
                let any = options::translate(Some(&any), cgroups_path)?.unwrap_or(any);
                let cgroup = options::shim_cgroup(Some(&any));
                Ok((encode(&|| any.write_to_bytes())?, cgroup))
            }
            BootstrapInput::Bootstrap(mut params) => {
                let mut cgroup = None;
                for value in
                    params.extensions.iter_mut().filter_map(|extension| extension.value.as_mut())
                {
                    if value.type_url.is_empty() {
                        continue;
                    }
                    if let Some(translated) = options::translate(Some(value), cgroups_path)? {
                        *value = translated;
                    }
                    cgroup = cgroup.or_else(|| options::shim_cgroup(Some(value)));
                }
                Ok((encode(&|| params.write_to_bytes())?, cgroup))
            }
        }
    }
}

impl BootstrapReply {
    /// Parses the stock shim's stdout.
    pub fn parse(bytes: &[u8]) -> Result<BootstrapReply, BootstrapReplyError> {
        let unknown = || BootstrapReplyError(String::from_utf8_lossy(bytes).into_owned());
        let text = std::str::from_utf8(bytes).map(str::trim);
        let answer = match text {
            Ok(text) if text.starts_with('{') => {
                BootstrapReply::Json(serde_json::from_str(text).map_err(|_| unknown())?)
            }
            Ok(text) if text.contains("://") && !text.chars().any(char::is_control) => {
                BootstrapReply::Plain(text.to_owned())
            }
            _ => BootstrapReply::Bootstrap(
                BootstrapResult::parse_from_bytes(bytes).map_err(|_| unknown())?,
            ),
        };
        if answer.address().is_empty() {
            return Err(unknown());
        }
        Ok(answer)
    }

    /// The address on which the shim serves, a `unix://` URL.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            BootstrapReply::Plain(address) => address,
            BootstrapReply::Json(value) => {
                value.get("address").and_then(Value::as_str).unwrap_or_default()
            }
            BootstrapReply::Bootstrap(result) => &result.address,
        }
    }

    /// The version of the task service that the stock shim supports.
    #[must_use]
    pub fn task_version(&self) -> i64 {
        match self {
            BootstrapReply::Plain(_) => 2,
            BootstrapReply::Json(value) => {
                value.get("version").and_then(Value::as_i64).unwrap_or(2)
            }
            BootstrapReply::Bootstrap(result) => i64::from(result.version),
        }
    }

    /// Encodes the reply in the form in which the stock shim wrote it, with this address in place
    /// of the stock shim's.
    pub fn with_address(self, address: &str) -> Result<Vec<u8>, BootstrapReplyError> {
        let failed = || BootstrapReplyError(address.to_owned());
        match self {
            BootstrapReply::Plain(_) => Ok(address.as_bytes().to_vec()),
            BootstrapReply::Json(mut value) => {
                value["address"] = Value::from(address);
                serde_json::to_vec(&value).map_err(|_| failed())
            }
            BootstrapReply::Bootstrap(mut result) => {
                result.address = address.to_owned();
                let bytes = result.write_to_bytes().map_err(|_| failed())?;
                // The protobuf crate writes a wrong length for a list of enum values with a
                // negative one. containerd could not read such a reply.
                match BootstrapResult::parse_from_bytes(&bytes) {
                    Ok(read) if read == result => Ok(bytes),
                    _ => Err(BootstrapReplyError(format!("{result:?}"))),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::bootstrap_api::Extension;
    use containerd_shim_protos::protobuf::MessageField;
    use proptest::prelude::*;

    use super::*;

    const STOCK: &str = "unix:///run/containerd/s/aa";
    const OURS: &str = "unix:///run/containerd/s/bb";

    #[test]
    fn a_plain_address_stays_plain() {
        let answer = BootstrapReply::parse(format!("{STOCK}\n").as_bytes()).unwrap();
        assert_eq!((answer.address(), answer.task_version()), (STOCK, 2));
        assert_eq!(answer.with_address(OURS).unwrap(), OURS.as_bytes());
    }

    #[test]
    fn json_keeps_order_and_unknown_fields() {
        let text = format!(r#"{{"version":3,"address":"{STOCK}","protocol":"ttrpc","new":[1]}}"#);
        let answer = BootstrapReply::parse(text.as_bytes()).unwrap();
        assert_eq!((answer.address(), answer.task_version()), (STOCK, 3));
        let got = String::from_utf8(answer.with_address(OURS).unwrap()).unwrap();
        assert_eq!(got, text.replace(STOCK, OURS));
    }

    #[test]
    fn reply_that_cannot_be_written_is_refused() {
        let mut bytes = BootstrapResult { address: STOCK.to_owned(), ..Default::default() }
            .write_to_bytes()
            .unwrap();
        // Field 4, the capabilities: a packed list with the value -1.
        bytes.extend([0x22, 10]);
        bytes.extend([0xff; 9]);
        bytes.push(1);
        let answer = BootstrapReply::parse(&bytes).unwrap();
        answer.with_address(OURS).unwrap_err();
    }

    #[test]
    fn protobuf_keeps_unknown_fields() {
        let mut result = BootstrapResult::new();
        result.version = 3;
        result.address = STOCK.to_owned();
        result.protocol = "ttrpc".to_owned();
        result.special_fields.mut_unknown_fields().add_length_delimited(99, b"later".to_vec());
        let answer = BootstrapReply::parse(&result.write_to_bytes().unwrap()).unwrap();
        assert_eq!((answer.address(), answer.task_version()), (STOCK, 3));
        result.address = OURS.to_owned();
        let got = BootstrapResult::parse_from_bytes(&answer.with_address(OURS).unwrap()).unwrap();
        assert_eq!(got, result);
    }

    #[test]
    fn no_address_is_an_error_with_the_text_in_it() {
        for text in ["", "time=x level=warning", "{}", "{\"address\":3}", "{"] {
            let error = BootstrapReply::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    fn any() -> Any {
        let mut any = Any::new();
        any.type_url = "runtimeoptions.v1.Options".to_owned();
        // This text is field 3 of the message, `config_body`.
        let body = b"SystemdCgroup = true\nShimCgroup = \"/s\"\n";
        any.value = [&[0x1a, body.len() as u8][..], body].concat();
        any
    }

    #[test]
    fn an_any_is_not_taken_for_bootstrap_params() {
        let bytes = any().write_to_bytes().unwrap();
        assert!(BootstrapParams::parse_from_bytes(&bytes).is_ok());
        let input = BootstrapInput::parse(&bytes, "k8s.io", "abc");
        assert_eq!(input, BootstrapInput::Options(any()));
        let (bytes, cgroup) = input.translate(None).unwrap();
        assert_eq!(cgroup.as_deref(), Some("/s"));
        let got = Any::parse_from_bytes(&bytes).unwrap();
        assert_eq!(got.type_url, options::RUNC_OPTIONS);
    }

    #[test]
    fn bootstrap_params_are_translated_inside() {
        let mut params = BootstrapParams::new();
        params.instance_id = "abc".to_owned();
        params.namespace = "k8s.io".to_owned();
        params.socket_dir = Some("/run/s".to_owned());
        params.special_fields.mut_unknown_fields().add_varint(77, 5);
        let mut extension = Extension::new();
        extension.value = MessageField::some(any());
        params.extensions.push(extension);
        let mut stranger = Extension::new();
        let mut other = Any::new();
        other.type_url = "x.Y".to_owned();
        stranger.value = MessageField::some(other);
        params.extensions.push(stranger);

        let input = BootstrapInput::parse(&params.write_to_bytes().unwrap(), "k8s.io", "abc");
        let (bytes, cgroup) = input.translate(None).unwrap();
        assert_eq!(cgroup.as_deref(), Some("/s"));
        let mut got = BootstrapParams::parse_from_bytes(&bytes).unwrap();
        assert_eq!(got.extensions[0].value.type_url, options::RUNC_OPTIONS);
        got.extensions[0].value = MessageField::some(any());
        assert_eq!(got, params, "every other field is unchanged");
    }

    #[test]
    fn nothing_stays_nothing() {
        let input = BootstrapInput::parse(b"", "n", "i");
        let got = input.translate(Some("a.slice:b:c")).unwrap();
        assert_eq!(got, (Vec::new(), None));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = BootstrapInput::parse(&bytes, "n", "i").translate(None);
            if let Ok(answer) = BootstrapReply::parse(&bytes) {
                let _ = answer.with_address(OURS);
            }
        }

        #[test]
        fn every_address_survives_every_form(name in "[a-z0-9/]{1,60}", version in 2i32..5) {
            let address = format!("unix:///{name}");
            let mut result = BootstrapResult::new();
            result.version = version;
            result.address.clone_from(&address);
            result.protocol = "ttrpc".to_owned();
            let json = format!(r#"{{"version":{version},"address":"{address}","protocol":"ttrpc"}}"#);
            for bytes in [result.write_to_bytes().unwrap(), json.into_bytes()] {
                let answer = BootstrapReply::parse(&bytes).unwrap();
                prop_assert_eq!(answer.address(), &address);
                prop_assert_eq!(answer.task_version(), i64::from(version));
                prop_assert_eq!(&answer.clone().with_address(&address).unwrap(), &bytes);
                let ours = BootstrapReply::parse(&answer.with_address(OURS).unwrap()).unwrap();
                prop_assert_eq!(ours.address(), OURS);
            }
        }
    }
}
