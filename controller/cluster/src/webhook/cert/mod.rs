//! The webhook's own certificate: how it is created, stored in a Secret, published to the API
//! server and renewed.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`plan`] | what to do next, without I/O |
//! | [`ca`] | authorities and certificates |
//! | [`rotation`] | the Secret and the MutatingWebhookConfiguration |
//!
//! Several replicas of the webhook rotate the certificate concurrently. Each step is one write,
//! which the API server accepts only if no other write came first (`resourceVersion`). The replica
//! whose write was rejected then reads again. Replicas may present different certificates for some
//! time, so the authorities of all of them are published.

pub mod ca;
pub mod plan;
pub mod rotation;
