//! Handles the calls of containerd that concern the containers of a group (pod): prepares and
//! announces a container at its Create, withdraws it at its end, and records the group's containers
//! for `delete`.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use containerd_shim_protos::api::CreateTaskRequest;
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use tracing::warn;

use crate::announce::Announcer;
use crate::bundle::Bundle;
use crate::create;
use crate::launch::Launcher;
use crate::paths::{ShimPaths, container_key};
use crate::proxy::TaskService;
use crate::{StartSettingsOf, report};

/// The containers of a group that this daemon serves.
#[derive(Debug)]
pub struct Containers {
    paths: ShimPaths,
    namespace: String,
    start_settings_of: StartSettingsOf,
    announcer: Announcer,
    /// Working folder of the daemon: the bundle of the container whose `start` spawned it.
    bundle: Bundle,
    members: RefCell<BTreeSet<String>>,
}

impl Containers {
    /// Creates an empty group. Needs a Tokio runtime, for the task that announces containers.
    #[must_use]
    pub fn new(namespace: &str, start_settings_of: StartSettingsOf) -> Containers {
        let paths = ShimPaths::own();
        Containers {
            announcer: Announcer::spawn(Launcher::new(paths.clone())),
            namespace: namespace.to_owned(),
            start_settings_of,
            paths,
            bundle: Bundle::new(std::env::current_dir().unwrap_or_default()),
            members: RefCell::default(),
        }
    }

    /// Withdraws the remaining containers from the controller. Takes at most `patience`.
    pub async fn finish(self, patience: Duration) {
        self.announcer.finish(patience).await;
    }

    /// Writes the list of the group's containers into the bundle, for the command `delete`. Does
    /// nothing if the bundle no longer exists.
    fn note_members(&self) {
        if !self.bundle.path().is_dir() {
            return;
        }
        let members = self.members.borrow();
        if let Err(error) = self.bundle.write_members(members.iter().map(String::as_str)) {
            warn!("{}", report(&error));
        }
    }
}

/// Runs a step of a container's preparation in a thread that may block. After a panic it returns the
/// default, so the container runs unmanaged.
async fn blocking<T: Default + Send + 'static>(
    id: &str,
    step: impl FnOnce() -> T + Send + 'static,
) -> T {
    tokio::task::spawn_blocking(step)
        .await
        .inspect_err(|error| warn!("container {id}: runs unmanaged: {error}"))
        .unwrap_or_default()
}

impl TaskService for Containers {
    async fn create(&self, request: &CreateTaskRequest) -> Option<Any> {
        let (paths, namespace) = (self.paths.clone(), self.namespace.clone());
        self.members.borrow_mut().insert(request.id.clone());
        self.note_members();
        let (id, start_settings_of) = (&request.id, self.start_settings_of);
        let (reads, manages) = (request.clone(), request.clone());
        let (options, spec) = blocking(id, move || create::read(&reads)).await;
        // The options are translated before, because the stock shim refuses those of the request. A
        // panic while the container is edited must not lose them.
        let manage =
            move |spec| create::manage(&paths, &namespace, &manages, spec, start_settings_of);
        if let Some(spec) = spec
            && let Some(container) = blocking(id, move || manage(spec)).await
        {
            self.announcer.add(container);
        }
        options
    }

    fn created(&self, id: &str, done: bool) {
        if !done {
            self.deleted(id);
        }
    }

    fn deleted(&self, id: &str) {
        // When the container of this daemon's bundle ends, containerd removes the bundle with the
        // list, so the list is not written.
        if self.members.borrow_mut().remove(id) && self.bundle.id() != Some(id) {
            self.note_members();
        }
        self.announcer.remove(container_key(&self.namespace, id));
    }
}

#[cfg(test)]
mod tests {
    use affinode_proto::paths::LIB_FILE;
    use containerd_shim_protos::types::mount::Mount;

    use super::*;
    use crate::options::RUNC_OPTIONS;

    /// The preparation of a container panics. Its options must be translated nevertheless, because
    /// the stock shim would refuse those that containerd sends.
    #[tokio::test]
    async fn a_panic_keeps_the_translated_options() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["bundle", "image/etc", "lib"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        std::fs::write(path("lib").join(LIB_FILE), "ELF").unwrap();
        let spec = serde_json::json!({
            "process": { "args": ["sh"], "env": ["NVIDIA_VISIBLE_DEVICES=all"] },
            "root": { "path": "rootfs" },
            "linux": { "cgroupsPath": "kubepods.slice:cri-containerd:x" },
        });
        std::fs::write(path("bundle/config.json"), spec.to_string()).unwrap();
        let paths =
            ShimPaths { run_dir: path("run"), lib_dir: path("lib"), config: path("affinode.toml") };
        let containers = Containers {
            announcer: Announcer::spawn(Launcher::new(paths.clone())),
            namespace: "ns".to_owned(),
            start_settings_of: |_, _| panic!("a fault of the shim"),
            paths,
            bundle: Bundle::new(path("bundle")),
            members: RefCell::default(),
        };
        let mut request = CreateTaskRequest::new();
        request.id = "box".to_owned();
        request.bundle = path("bundle").display().to_string();
        request.rootfs.push(Mount {
            type_: "bind".to_owned(),
            source: path("image").display().to_string(),
            options: vec!["rbind".to_owned(), "rw".to_owned()],
            ..Mount::default()
        });
        let options = containers.create(&request).await.unwrap();
        assert_eq!(options.type_url, RUNC_OPTIONS);
        assert!(!containers.paths.container(&container_key("ns", "box")).exists());
    }
}
