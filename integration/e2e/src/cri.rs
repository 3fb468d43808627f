//! A client for the part of CRI that a kubelet uses to run a pod. The module connects to the socket
//! of containerd or CRI-O, and builds the CRI configurations of pods and containers. It also opens
//! the pipes through which a test communicates with the program of a GPU container.

mod messages;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

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

pub use self::messages::*;
use crate::{
    container::{CLIENTS, PIPES, make_pipes, piped},
    image,
    testbed::Testbed,
    wait::until,
    worker::{Lines, USUAL},
};

/// Mapping of the users in a pod's user namespace to users of the host.
pub const OWN_USERS: IdMapping = IdMapping { host_id: 655_360, container_id: 0, length: 65_536 };

/// A client of the CRI service of containerd or CRI-O.
pub struct Cri {
    runtime: Runtime,
    channel: Channel,
}

impl Cri {
    /// Connects to the socket. Waits until the runtime serves CRI, which begins shortly after the
    /// start of containerd or CRI-O.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn connect(socket: &Path) -> Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        let channel = runtime.block_on(async { endpoint.connect_lazy() });
        let cri = Self { runtime, channel };
        let mut last = None;
        until("CRI to be served", || {
            match cri.call::<Nothing, Nothing>("ListPodSandbox", Nothing {}) {
                Ok(Nothing {}) => Ok(Some(())),
                Err(error) => {
                    last = Some(error);
                    Ok(None)
                }
            }
        })
        .with_context(|| format!("{} does not serve CRI: {last:?}", socket.display()))?;
        Ok(cri)
    }

    /// Returns the features that containerd reports for a runtime handler. If a pod needs a feature
    /// that is not in this report, a kubelet rejects the pod.
    ///
    /// # Errors
    /// When a request to CRI fails, or there is no such handler.
    pub fn features(&self, handler: &str) -> Result<Features> {
        let answer: StatusResponse = self.call("Status", Nothing {})?;
        let found = answer.runtime_handlers.iter().find(|known| known.name == handler);
        found
            .and_then(|known| known.features)
            .context("containerd reports no such runtime handler to CRI")
    }

    /// Creates the sandbox of a pod with a runtime handler, as a kubelet does for a RuntimeClass.
    /// Returns the pod's id.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn run_pod(&self, config: &PodConfig, handler: &str) -> Result<String> {
        // containerd's CRI learns of imported images by events. Without the image of the sandbox, it
        // would try to pull it.
        until("the image of the sandbox to be known to CRI", || {
            let image = Some(ImageSpec { image: image::PAUSE.into(), ..ImageSpec::default() });
            let status: ImageStatusResponse =
                self.call_service("ImageService", "ImageStatus", ImageStatusRequest { image })?;
            Ok(status.image.map(|Nothing {}| ()))
        })?;
        let request =
            RunPodSandboxRequest { config: Some(config.clone()), runtime_handler: handler.into() };
        let answer: Id = self.call("RunPodSandbox", request)?;
        Ok(answer.id)
    }

    /// Creates and starts a container in a pod. The container has the labels that a kubelet sets.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn run_container(
        &self,
        pod_id: &str,
        config: &ContainerConfig,
        pod: &PodConfig,
    ) -> Result<String> {
        let mut config = config.clone();
        config.labels.extend(pod.labels.clone());
        let name = config.metadata.as_ref().map(|metadata| metadata.name.clone());
        config.labels.insert("io.kubernetes.container.name".into(), name.unwrap_or_default());
        let request = CreateContainerRequest {
            pod_sandbox_id: pod_id.into(),
            config: Some(config),
            sandbox_config: Some(pod.clone()),
        };
        let Id { id } = self.call("CreateContainer", request)?;
        let Nothing {} = self.call("StartContainer", Id { id: id.clone() })?;
        Ok(id)
    }

    /// Runs a program in a container, and returns its output and exit code.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn exec(&self, container_id: &str, cmd: &[&str]) -> Result<ExecSyncResponse> {
        let cmd = cmd.iter().map(|&word| word.to_owned()).collect();
        self.call(
            "ExecSync",
            ExecSyncRequest { container_id: container_id.into(), cmd, timeout: 60 },
        )
    }

    /// Returns CRI's number for the state of a container.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn state(&self, container_id: &str) -> Result<i32> {
        Ok(self.status(container_id)?.state)
    }

    /// Waits until a container has ended, and returns its exit code.
    ///
    /// # Errors
    /// When the container has not ended in time, or a request to CRI fails.
    pub fn exit_code(&self, container_id: &str) -> Result<i32> {
        until("the container to exit", || {
            let status = self.status(container_id)?;
            Ok((status.state == EXITED).then_some(status.exit_code))
        })
    }

    fn status(&self, container_id: &str) -> Result<ContainerStatus> {
        let answer: ContainerStatusResponse =
            self.call("ContainerStatus", Id { id: container_id.into() })?;
        answer.status.context("the response of CRI has no status")
    }

    /// Stops a container with SIGTERM. After `seconds` seconds, the runtime sends SIGKILL.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn stop_container(&self, container_id: &str, seconds: i64) -> Result<()> {
        let stop = StopContainerRequest { container_id: container_id.into(), timeout: seconds };
        let Nothing {} = self.call("StopContainer", stop)?;
        Ok(())
    }

    /// Stops and removes a container.
    ///
    /// # Errors
    /// When a request to CRI fails.
    pub fn remove_container(&self, container_id: &str) -> Result<()> {
        self.stop_container(container_id, 0)?;
        let Nothing {} = self.call("RemoveContainer", Id { id: container_id.into() })?;
        Ok(())
    }

    /// Stops and removes a pod with all of its containers.
    ///
    /// # Errors
    /// When a request to CRI fails.
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
        self.call_service("RuntimeService", method, request)
    }

    fn call_service<Q, A>(&self, service: &str, method: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let path: PathAndQuery = format!("/runtime.v1.{service}/{method}").parse()?;
        let mut client = Grpc::new(self.channel.clone());
        let answer = self.runtime.block_on(async move {
            client.ready().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
            client.unary(Request::new(request), path, ProstCodec::<Q, A>::default()).await
        });
        Ok(answer.with_context(|| format!("the CRI request {method} failed"))?.into_inner())
    }
}

/// Describes a pod that uses the host's network. The cgroups of its containers are below
/// `cgroup_parent`.
pub fn pod(name: &str, cgroup_parent: &str, logs: &Path) -> PodConfig {
    let (uid, namespace) = (format!("uid-{name}"), "team");
    // A kubelet adds these labels, from which CRI-O makes annotations of the container's spec.
    let labels = [("name", name), ("namespace", namespace), ("uid", &uid)];
    let labels = labels.map(|(key, value)| (format!("io.kubernetes.pod.{key}"), value.to_owned()));
    PodConfig {
        metadata: Some(PodMetadata { name: name.into(), uid, namespace: namespace.into() }),
        log_directory: logs.display().to_string(),
        labels: labels.into_iter().collect(),
        annotations: HashMap::new(),
        linux: Some(LinuxPod {
            cgroup_parent: format!("/{cgroup_parent}"),
            security_context: Some(PodSecurity { namespaces: Some(host_network()) }),
        }),
    }
}

fn host_network() -> Namespaces {
    Namespaces { network: NODE, userns_options: None }
}

/// Changes a pod and one of its containers so that they use a user namespace, as a kubelet does for
/// `hostUsers: false`. Such a pod also has a network namespace of its own.
pub fn of_own_users(pod: &mut PodConfig, container: &mut ContainerConfig) {
    let ids = vec![OWN_USERS];
    let users = UserNamespace { uids: ids.clone(), gids: ids.clone() };
    let namespaces = Namespaces { network: POD, userns_options: Some(users) };
    for mount in &mut container.mounts {
        mount.uid_mappings.clone_from(&ids);
        mount.gid_mappings.clone_from(&ids);
    }
    if let Some(linux) = &mut container.linux {
        let namespaces = Some(namespaces.clone());
        linux.security_context = Some(ContainerSecurity { namespaces });
    }
    if let Some(linux) = &mut pod.linux {
        linux.security_context = Some(PodSecurity { namespaces: Some(namespaces) });
    }
}

/// Describes a container that uses the host's network.
pub fn container(name: &str, image: &str, command: &[String]) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into() }),
        image: Some(ImageSpec { image: image.into(), user_specified_image: image.into() }),
        command: command.to_vec(),
        log_path: format!("{name}.log"),
        linux: Some(LinuxContainer {
            security_context: Some(ContainerSecurity { namespaces: Some(host_network()) }),
        }),
        ..ContainerConfig::default()
    }
}

/// Describes a container with the testbed's GPU, and opens the pipes to its program. The program is
/// the CUDA test program [`USUAL`], which fills `mib` MiB of VRAM.
///
/// # Errors
/// When the pipes cannot be created.
pub fn gpu_container(world: &Testbed, name: &str, mib: u64) -> Result<(ContainerConfig, Lines)> {
    let parts = world.gpu().container_parts(world.artifacts(), world.dir())?;
    let pipes = make_pipes(world.dir(), name)?;
    let argv = piped(&[format!("{CLIENTS}/{USUAL}"), "--mib".into(), mib.to_string()]);
    let mut config = container(name, image::PLAIN, &argv);
    config.envs = parts.env.into_iter().map(|(key, value)| KeyValue { key, value }).collect();
    let mount = |(host, inside): (PathBuf, PathBuf), readonly| Mount {
        container_path: inside.display().to_string(),
        host_path: host.display().to_string(),
        readonly,
        ..Mount::default()
    };
    config.mounts = parts.mounts.into_iter().map(|places| mount(places, true)).collect();
    config.mounts.push(mount((world.artifacts().clients_dir(), CLIENTS.into()), true));
    config.mounts.push(mount((pipes.clone(), PIPES.into()), false));
    Ok((config, Lines::open(&pipes)?))
}
