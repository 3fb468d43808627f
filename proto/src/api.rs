//! The control API, generated from `control.proto`: messages in [`control`],
//! ttrpc client and service in [`control_ttrpc`].

/// Encodes and decodes messages. The shims' announcements are stored in files in this form.
pub use protobuf::Message;

/// The generated messages of the API.
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

/// The generated ttrpc client and service.
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
