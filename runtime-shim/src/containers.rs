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
use crate::create::{self, PreparedContainer};
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

impl TaskService for Containers {
    async fn create(&self, request: &CreateTaskRequest) -> Option<Any> {
        let (paths, namespace) = (self.paths.clone(), self.namespace.clone());
        self.members.borrow_mut().insert(request.id.clone());
        self.note_members();
        let (id, request, start_settings_of) =
            (&request.id, request.clone(), self.start_settings_of);
        let prepare = move || create::prepare(&paths, &namespace, &request, start_settings_of);
        let PreparedContainer { options, container } = tokio::task::spawn_blocking(prepare)
            .await
            .inspect_err(|error| warn!("container {id}: runs unmanaged: {error}"))
            .unwrap_or_default();
        if let Some(container) = container {
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
