//! The webhook's own certificate: created, stored in a Secret, published to the API server,
//! renewed.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`plan`] | what to do next, without I/O |
//! | [`ca`] | authorities and certificates |
//! | [`rotation`] | the Secret and the MutatingWebhookConfiguration |
//!
//! Several replicas do all of it concurrently. Each step is one write that the API server accepts
//! only if no other write came first (`resourceVersion`); the later replica reads again. Replicas
//! may present different certificates for a while: the authorities of all of them are published.

pub mod ca;
pub mod plan;
pub mod rotation;
