//! Fills a node with load: announced containers, and processes that connect to their sockets.

use std::{
    collections::HashMap,
    process::{Child, Stdio},
};

use affinode_e2e::{testbed::Testbed, wait::until};
use affinode_proto::{
    api::{
        control::{AnnounceRequest, Announcement},
        control_ttrpc::ControlClient,
    },
    paths,
};
use anyhow::{Context, Result};
use ttrpc::{r#async::Client, context::with_duration};

/// Time limit for a reply of the controller.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(30);

/// The CUDA processes of the load. They end when this value is dropped.
pub struct LoadProcesses {
    keys: Vec<String>,
    children: Vec<Child>,
}

impl LoadProcesses {
    /// Announces containers, starts their processes, and waits until all processes are registered.
    pub fn gather(world: &Testbed, containers: usize, processes: usize) -> Result<LoadProcesses> {
        let keys: Vec<String> = (0..containers).map(|n| format!("{n:032x}")).collect();
        announce(world, &keys)?;
        let mut load = LoadProcesses { keys, children: Vec::new() };
        let program = world.artifacts().clients_dir().join("dlopen_dlsym");
        let library = world.artifacts().lib_dir().join("libaffinode_preload.so");
        for key in &load.keys {
            let folder = world.cli().run_dir().join(paths::CONTAINERS_DIR).join(key);
            let socket = folder.join(paths::MOUNT_DIR).join(paths::AGENT_SOCKET);
            for _ in 0..processes {
                let child = world
                    .host_gpu_command(&program)
                    .args(["--mib", "1"])
                    .env("LD_PRELOAD", &library)
                    .env(paths::AGENT_SOCKET_ENV, &socket)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::null())
                    .spawn()
                    .with_context(|| format!("cannot start {}", program.display()))?;
                load.children.push(child);
            }
        }
        let wanted = containers * processes;
        until(&format!("{wanted} registered processes"), || {
            let node = world.cli().ps()?;
            let load = node.containers.iter().filter(|c| c.namespace == "load");
            let there: usize = load.map(|c| c.processes.len()).sum();
            Ok((there >= wanted).then_some(()))
        })?;
        Ok(load)
    }

    /// Keys of the containers.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }
}

impl Drop for LoadProcesses {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

fn announce(world: &Testbed, keys: &[String]) -> Result<()> {
    let socket = world.cli().run_dir().join(paths::CONTROL_SOCKET);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Client::connect(&format!("unix://{}", socket.display())).await?;
        let control = ControlClient::new(client);
        for (n, key) in keys.iter().enumerate() {
            let container = Announcement {
                key: key.clone(),
                namespace: "load".into(),
                id: format!("container-{n}"),
                pod_namespace: format!("team-{}", n % 8),
                pod: format!("pod-{n}"),
                container: "main".into(),
                annotations: HashMap::new(),
                // Any existing folder can be named here. It is not changed.
                bundle: world.dir().display().to_string(),
                ..Announcement::default()
            };
            let request =
                AnnounceRequest { container: Some(container).into(), ..Default::default() };
            control.announce(with_duration(ANSWER), &request).await?;
        }
        Ok(())
    })
}
