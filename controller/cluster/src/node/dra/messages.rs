//! The messages of three gRPC services between kubelet and plugins: `pluginregistration/v1`, `dra/v1`
//! and `dra-health/v1alpha1` of the module `k8s.io/kubelet`. Types and field numbers are those of its
//! `api.proto` files, version 0.36.3.

use std::collections::HashMap;

use prost::Message;

/// The kubelet's request for the properties of a plugin.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct InfoRequest {}

/// Properties of a plugin, from which the kubelet registers it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginInfo {
    /// Kind of the plugin, for example `DRAPlugin`.
    #[prost(string, tag = "1")]
    pub r#type: String,
    /// Name of the driver.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Path of the socket on which the plugin serves its calls, as the node sees it.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// Services that the socket serves.
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Result of a registration, sent by the kubelet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    /// Whether the kubelet uses the plugin.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// Reason why the kubelet does not use the plugin.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Confirms that a [`RegistrationStatus`] has arrived.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatusResponse {}

/// Identity of a ResourceClaim in a request of the kubelet: namespace, name and UID.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimReference {
    /// Namespace of the claim.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// UID of the claim.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// Name of the claim.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// The kubelet's request to prepare claims, or to revert their preparation.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimsRequest {
    /// The claims, which belong to pods of this node.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<ClaimReference>,
}

/// Results of the preparation of claims.
#[derive(Clone, PartialEq, Message)]
pub struct PrepareResponse {
    /// One result for each claim, by the claim's UID.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, PreparedClaim>,
}

/// Result of the preparation of one claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreparedClaim {
    /// The claim's devices of this driver.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PreparedDevice>,
    /// Reason why the claim is not prepared. Empty: the claim is prepared.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device that is prepared for containers.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreparedDevice {
    /// Requests of the claim for which the device was allocated.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// Pool of the device.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// Name of the device in the pool.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// CDI devices that a container of the claim gets.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    /// Identity of the share of the device that is allocated to the claim. `None`: the whole device
    /// is allocated.
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

/// Results of the requests to revert preparations.
#[derive(Clone, PartialEq, Message)]
pub struct UnprepareResponse {
    /// One result for each claim, by the claim's UID.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, UnpreparedClaim>,
}

/// Result of the request to revert one preparation.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UnpreparedClaim {
    /// Reason why the preparation could not be reverted. Empty if it was reverted.
    #[prost(string, tag = "1")]
    pub error: String,
}

/// The kubelet's request for reports about the health of devices.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HealthRequest {}

/// Status of a device that works, in a [`DeviceHealth`].
pub const HEALTHY: i32 = 1;
/// Status of a device that does not work, in a [`DeviceHealth`].
pub const UNHEALTHY: i32 = 2;

/// A report about the health of all devices of the driver on this node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HealthReport {
    /// The devices that the driver has offered.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<DeviceHealth>,
}

/// Health of one device.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceHealth {
    /// The device that this entry describes.
    #[prost(message, optional, tag = "1")]
    pub device: Option<DeviceId>,
    /// [`HEALTHY`] or [`UNHEALTHY`]. 0: unknown.
    #[prost(int32, tag = "2")]
    pub health: i32,
    /// Time at which the driver determined the health, in seconds since 1970.
    #[prost(int64, tag = "3")]
    pub last_updated_seconds: i64,
    /// Time after which the kubelet considers the health unknown, in seconds.
    #[prost(int64, tag = "4")]
    pub timeout_seconds: i64,
    /// Reason why the device is unhealthy, for people. The kubelet shortens it to 1,024 characters.
    #[prost(string, tag = "5")]
    pub message: String,
}

/// Name of a device of the driver.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceId {
    /// Pool of the device.
    #[prost(string, tag = "1")]
    pub pool_name: String,
    /// Name of the device in the pool.
    #[prost(string, tag = "2")]
    pub device_name: String,
}
