//! The control API, generated from `control.proto`: messages in [`control`],
//! ttrpc client and service in [`control_ttrpc`].

/// Trait that encodes and decodes Protobuf messages. A shim's announcement of a container is stored
/// in a file in this encoding.
pub use protobuf::Message;

/// The messages of the control API, generated from `control.proto`.
#[allow(
    missing_docs,
    nonstandard_style,
    clippy::all,
    clippy::too_many_lines,
    clippy::unwrap_used,
    unused,
    rustdoc::all
)]
pub mod control {
    include!(concat!(env!("OUT_DIR"), "/control.rs"));
}

/// The ttrpc client and service of the control API, generated from `control.proto`.
#[allow(
    missing_docs,
    nonstandard_style,
    clippy::all,
    clippy::too_many_lines,
    clippy::unwrap_used,
    unused,
    rustdoc::all
)]
pub mod control_ttrpc {
    use super::control;
    include!(concat!(env!("OUT_DIR"), "/control_ttrpc.rs"));
}
