//! The messages of the gRPC services `v1beta1.Registration` and `v1beta1.DevicePlugin` between
//! kubelet and device plugins. Types and field numbers are those of `deviceplugin/v1beta1/api.proto`
//! of the module `k8s.io/kubelet`, version 0.36.3. Fields that this plugin does not use are left out.

use std::collections::HashMap;

use prost::Message;

/// A message without content.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Empty {}

/// The optional calls of a device plugin that the kubelet may use.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DevicePluginOptions {
    /// Whether the kubelet must call the plugin before the start of each container.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// Whether the kubelet should ask the plugin which of the free devices a container gets.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// Request by which a device plugin registers at the kubelet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegisterRequest {
    /// Version of the API for device plugins that the plugin uses.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Name of the plugin's socket in the kubelet's folder.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// Name of the resource by which pods request the devices.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// Optional calls of the plugin that the kubelet may use.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// All devices of a plugin.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListAndWatchResponse {
    /// The devices, each with its health.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device as the kubelet counts it: one seat.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// Identity of the device, of at most 63 characters.
    #[prost(string, tag = "1")]
    pub id: String,
    /// `Healthy` or `Unhealthy`.
    #[prost(string, tag = "2")]
    pub health: String,
}

/// The kubelet's question which of the free devices the plugin prefers for the containers of a pod.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreferredAllocationRequest {
    /// One request for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferredAllocationRequest>,
}

/// The part of a [`PreferredAllocationRequest`] for one container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerPreferredAllocationRequest {
    /// Identities of the free devices from which the plugin chooses.
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    /// Identities of the devices that the plugin must choose.
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    /// Number of devices to choose.
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

/// The choices for the containers of a pod.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreferredAllocationResponse {
    /// One choice for each container, in the order of the requests.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerPreferredAllocationResponse>,
}

/// The choice for one container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerPreferredAllocationResponse {
    /// Identities of the devices that the plugin chose.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// The kubelet's request for the environment variables and CDI devices through which the containers
/// of a pod use their devices.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateRequest {
    /// One request for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// The part of an [`AllocateRequest`] for one container: the devices that the kubelet has assigned
/// to it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateRequest {
    /// Identities of the devices of the container.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// Environment variables and CDI devices for the containers of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateResponse {
    /// One answer for each container, in the order of the requests.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// Environment variables and CDI devices for one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateResponse {
    /// Environment variables of the container.
    #[prost(map = "string, string", tag = "1")]
    pub envs: HashMap<String, String>,
    /// CDI devices of the container.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A CDI device that the container runtime adds.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    /// Name with its kind, such as `nvidia.com/gpu=0`.
    #[prost(string, tag = "1")]
    pub name: String,
}
