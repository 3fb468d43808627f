//! A certificate of the webhook's own: made, stored in a Secret, told to the API server, renewed.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`plan`] | what to do next, without I/O |
//! | [`ca`] | authorities and certificates |
//! | [`rotation`] | the Secret and the MutatingWebhookConfiguration |
//!
//! Several replicas do all of it at once. Each step is one write that the API server takes only
//! if nobody wrote before (`resourceVersion`); who comes second reads again. Replicas may show
//! different certificates for a while: the authorities of all of them are published.

pub mod ca;
pub mod plan;
pub mod rotation;
