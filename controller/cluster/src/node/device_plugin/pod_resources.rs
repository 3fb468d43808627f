//! Asks the kubelet which seats pods have. Types and field numbers are those of
//! `podresources/v1/api.proto` of the module `k8s.io/kubelet`, version 0.36.3. Fields that are not
//! used are left out.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use prost::Message;
use tonic::{Request, Status, client::Grpc, codegen::http::uri::PathAndQuery};
use tonic_prost::ProstCodec;

use super::{
    kubelet::{self, LinkError},
    messages::Empty,
    resource::ResourceName,
};

/// Name of the folder of the kubelet's socket, next to the folder of device plugins.
pub const FOLDER: &str = "pod-resources";
/// Path of the method that lists the devices of pods.
pub const LIST: &str = "/v1.PodResourcesLister/List";
/// Time limit for the kubelet's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of the kubelet's answer. A node with hundreds of pods needs less than 1 MiB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The pods of the node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListPodResourcesResponse {
    /// The pods that have not ended.
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<PodResources>,
}

/// A pod of the node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PodResources {
    /// The containers of the pod.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// A container of a pod.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerResources {
    /// The devices of the container.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

/// Devices of a container that belong to one resource.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerDevices {
    /// Name of the resource.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// Identities of the devices.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

/// Reason why it is unknown which seats pods have.
#[derive(Debug, thiserror::Error)]
pub enum SeatUseError {
    /// The plugin cannot connect to the kubelet's socket.
    #[error(transparent)]
    Connect(#[from] LinkError),
    /// The kubelet refused the request.
    #[error("the kubelet does not list the devices of pods: {0}")]
    Refused(String),
    /// The kubelet did not answer in time.
    #[error("the kubelet did not list the devices of pods within {ANSWER_TIMEOUT:?}")]
    Late,
}

/// The kubelet's service that lists the devices of pods.
#[derive(Clone, Debug)]
pub struct PodResourcesLister {
    /// Folder of the kubelet's socket, as this process sees it.
    pub folder: PathBuf,
    /// Name of the resource of the seats.
    pub resource: ResourceName,
}

impl PodResourcesLister {
    /// Returns the identities of the seats that pods have.
    ///
    /// # Errors
    /// [`SeatUseError`]: the kubelet did not answer.
    pub async fn taken_seats(&self) -> Result<BTreeSet<String>, SeatUseError> {
        let listed = tokio::time::timeout(ANSWER_TIMEOUT, self.list()).await;
        let pods = listed.map_err(|_| SeatUseError::Late)??.pods;
        let containers = pods.into_iter().flat_map(|pod| pod.containers);
        let devices = containers.flat_map(|container| container.devices);
        let own = devices.filter(|devices| devices.resource_name == self.resource.to_string());
        Ok(own.flat_map(|devices| devices.device_ids).collect())
    }

    async fn list(&self) -> Result<ListPodResourcesResponse, SeatUseError> {
        let refused = |status: Status| SeatUseError::Refused(status.message().to_owned());
        let channel = kubelet::connect(&self.folder).await?;
        let mut client = Grpc::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
        client.ready().await.map_err(|error| SeatUseError::Refused(error.to_string()))?;
        let codec = ProstCodec::<Empty, ListPodResourcesResponse>::default();
        let path = PathAndQuery::from_static(LIST);
        Ok(client.unary(Request::new(Empty {}), path, codec).await.map_err(refused)?.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::dra::{
        services::{serve, try_unary},
        sockets::NodeSocket,
    };

    fn devices(resource_name: &str, ids: &[&str]) -> ContainerDevices {
        let device_ids = ids.iter().map(|id| (*id).to_owned()).collect();
        ContainerDevices { resource_name: resource_name.into(), device_ids }
    }

    #[tokio::test]
    async fn seats_of_all_containers_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let lister = PodResourcesLister {
            folder: folder.path().to_owned(),
            resource: "affinode.io/gpu".parse().unwrap(),
        };
        assert!(lister.taken_seats().await.is_err(), "no kubelet runs");
        let seats = |ids: &[&str]| ContainerResources {
            devices: vec![devices("nvidia.com/gpu", &["GPU-z"]), devices("affinode.io/gpu", ids)],
        };
        let answer = ListPodResourcesResponse {
            pods: vec![
                PodResources { containers: vec![seats(&["a::0"]), seats(&["a::1", "b::0"])] },
                PodResources { containers: vec![ContainerResources::default(), seats(&["b::2"])] },
            ],
        };
        let socket = folder.path().join(kubelet::KUBELET);
        let (listener, _socket) = NodeSocket::bind(&socket).unwrap();
        let serving = serve(listener, move |request| {
            assert_eq!(request.uri().path(), LIST);
            let answer = answer.clone();
            try_unary(request, async move |_: Empty| Ok(answer))
        });
        let taken = tokio::select! {
            taken = lister.taken_seats() => taken.unwrap(),
            ended = serving => panic!("{ended:?}"),
        };
        assert_eq!(Vec::from_iter(taken), ["a::0", "a::1", "b::0", "b::2"]);
    }
}
