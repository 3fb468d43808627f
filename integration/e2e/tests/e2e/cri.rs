//! The part of CRI that kubelet uses to run a pod: messages with the field
//! numbers of `runtime.v1`, and a client over containerd's socket.

use std::{collections::HashMap, path::Path};

use affinode_e2e::until::until;
use anyhow::{Context, Result};
use prost::Message;
use tokio::runtime::Runtime;
use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

/// `NamespaceMode.NODE`: the host's network, so that no CNI plugin is needed.
const NODE: i32 = 2;
/// `ContainerState.CONTAINER_EXITED`.
pub const EXITED: i32 = 2;

/// A pod.
#[derive(Clone, PartialEq, Message)]
pub struct PodConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<PodMetadata>,
    #[prost(string, tag = "3")]
    pub log_directory: String,
    #[prost(map = "string, string", tag = "7")]
    pub annotations: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    pub linux: Option<LinuxPod>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxPod {
    #[prost(string, tag = "1")]
    pub cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    pub security_context: Option<PodSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodSecurity {
    #[prost(message, optional, tag = "1")]
    pub namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Namespaces {
    #[prost(int32, tag = "1")]
    pub network: i32,
}

/// A container of a pod.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    pub image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    pub command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    pub envs: Vec<KeyValue>,
    #[prost(message, repeated, tag = "7")]
    pub mounts: Vec<Mount>,
    #[prost(map = "string, string", tag = "10")]
    pub annotations: HashMap<String, String>,
    #[prost(string, tag = "11")]
    pub log_path: String,
    #[prost(message, optional, tag = "15")]
    pub linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ImageSpec {
    #[prost(string, tag = "1")]
    pub image: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub container_path: String,
    #[prost(string, tag = "2")]
    pub host_path: String,
    #[prost(bool, tag = "3")]
    pub readonly: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinuxContainer {
    #[prost(message, optional, tag = "2")]
    pub security_context: Option<ContainerSecurity>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerSecurity {
    #[prost(message, optional, tag = "3")]
    pub namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, Message)]
struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodConfig>,
    #[prost(string, tag = "2")]
    runtime_handler: String,
}

/// Several requests and answers are one id in field 1.
#[derive(Clone, PartialEq, Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodConfig>,
}

#[derive(Clone, PartialEq, Message)]
struct StopContainerRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(int64, tag = "2")]
    timeout: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ExecSyncRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(string, repeated, tag = "2")]
    cmd: Vec<String>,
    #[prost(int64, tag = "3")]
    timeout: i64,
}

/// What a program that was run in a container left.
#[derive(Clone, PartialEq, Message)]
pub struct ExecSyncResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    pub exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<ContainerStatus>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatus {
    #[prost(int32, tag = "3")]
    state: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

/// A client of containerd's CRI service.
pub struct Cri {
    runtime: Runtime,
    channel: Channel,
}

impl Cri {
    /// Connects, and waits until CRI serves: it begins to a moment after containerd.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        let cri = Self { runtime, channel };
        let mut last = None;
        until("CRI to serve", || {
            match cri.call::<Nothing, Nothing>("ListPodSandbox", Nothing {}) {
                Ok(Nothing {}) => Ok(Some(())),
                Err(error) => {
                    last = Some(error);
                    Ok(None)
                }
            }
        })
        .with_context(|| format!("{last:?}"))?;
        Ok(cri)
    }

    /// Runs a sandbox with a runtime handler, as kubelet does for a RuntimeClass.
    pub fn run_pod(&self, config: &PodConfig, handler: &str) -> Result<String> {
        let request =
            RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.into() };
        let answer: Id = self.call("RunPodSandbox", request)?;
        Ok(answer.id)
    }

    /// Creates and starts a container.
    pub fn run_container(
        &self,
        pod_id: &str,
        config: &ContainerConfig,
        pod: &PodConfig,
    ) -> Result<String> {
        let request = CreateContainerRequest {
            pod_sandbox_id: pod_id.into(),
            config: Some(config.clone()),
            sandbox_config: Some(pod.clone()),
        };
        let Id { id } = self.call("CreateContainer", request)?;
        let Nothing {} = self.call("StartContainer", Id { id: id.clone() })?;
        Ok(id)
    }

    /// Runs a program in a container.
    pub fn exec(&self, container_id: &str, cmd: &[&str]) -> Result<ExecSyncResponse> {
        let cmd = cmd.iter().map(|&word| word.to_owned()).collect();
        self.call(
            "ExecSync",
            ExecSyncRequest { container_id: container_id.into(), cmd, timeout: 60 },
        )
    }

    /// The state of a container.
    pub fn state(&self, container_id: &str) -> Result<i32> {
        let answer: ContainerStatusResponse =
            self.call("ContainerStatus", Id { id: container_id.into() })?;
        Ok(answer.status.context("no status")?.state)
    }

    /// Stops and removes a container.
    pub fn remove_container(&self, container_id: &str) -> Result<()> {
        let stop = StopContainerRequest { container_id: container_id.into(), timeout: 0 };
        let Nothing {} = self.call("StopContainer", stop)?;
        let Nothing {} = self.call("RemoveContainer", Id { id: container_id.into() })?;
        Ok(())
    }

    /// Stops and removes a pod with all that is in it.
    pub fn remove_pod(&self, pod_id: &str) -> Result<()> {
        let Nothing {} = self.call("StopPodSandbox", Id { id: pod_id.into() })?;
        let Nothing {} = self.call("RemovePodSandbox", Id { id: pod_id.into() })?;
        Ok(())
    }

    fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let path: PathAndQuery = format!("/runtime.v1.RuntimeService/{method}").parse()?;
        let mut client = Grpc::new(self.channel.clone());
        let answer = self.runtime.block_on(async move {
            client.ready().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
            client.unary(Request::new(request), path, ProstCodec::<Q, A>::default()).await
        });
        Ok(answer.with_context(|| format!("CRI {method}"))?.into_inner())
    }
}

/// A pod on the host's network, whose containers' cgroups are below `cgroup_parent`.
pub fn pod(name: &str, cgroup_parent: &str, logs: &Path) -> PodConfig {
    PodConfig {
        metadata: Some(PodMetadata {
            name: name.into(),
            uid: format!("uid-{name}"),
            namespace: "team".into(),
        }),
        log_directory: logs.display().to_string(),
        annotations: HashMap::new(),
        linux: Some(LinuxPod {
            cgroup_parent: format!("/{cgroup_parent}"),
            security_context: Some(PodSecurity { namespaces: Some(Namespaces { network: NODE }) }),
        }),
    }
}

/// A container on the host's network.
pub fn container(name: &str, image: &str, command: &[String]) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into() }),
        image: Some(ImageSpec { image: image.into() }),
        command: command.to_vec(),
        log_path: format!("{name}.log"),
        linux: Some(LinuxContainer {
            security_context: Some(ContainerSecurity {
                namespaces: Some(Namespaces { network: NODE }),
            }),
        }),
        ..ContainerConfig::default()
    }
}
