//! Handles the announcement of each new container, and the withdrawal of each deleted container.
//! Creates or closes the container's socket, and sends an input to the core (the module that
//! decides about moves).

use std::{fs::File, io::Read, path::Path, sync::Arc};

use affinode_core::{ContainerSpec, Input, Key};
use affinode_proto::{
    api::{Message, control::Announcement},
    paths,
};

use super::{actor::NodeActor, effects, hints, overrides};
use crate::{
    agents::AgentListener, conversion, error_chain, handle::CommandError, inventory::process,
};

/// Handles a shim's announcement of a container. Returns warnings about invalid annotations of the
/// container.
pub(super) fn announced(
    actor: &mut NodeActor,
    announcement: Announcement,
) -> Result<Vec<String>, CommandError> {
    let key = Key::parse(&announcement.key)?;
    announce(actor, key, conversion::spec_of(announcement))
}

/// Handles a container that was created, or a job that was admitted. Returns warnings about its
/// invalid annotations.
pub(super) fn announce(
    actor: &mut NodeActor,
    key: Key,
    spec: ContainerSpec,
) -> Result<Vec<String>, CommandError> {
    if actor.node.is_of_another(&key, spec.generation) {
        // The previous container with this id is gone, but its shim has not withdrawn it.
        withdraw(actor, key.clone());
    }
    if !actor.listeners.contains_key(&key) {
        let owner = spec.job_user;
        let (numbers, mail) = (Arc::clone(&actor.numbers), actor.mail.clone());
        let listener =
            AgentListener::open(&mut actor.sockets, &actor.run_dir, &key, owner, numbers, mail)
                .map_err(|source| CommandError::Socket { id: spec.id.clone(), source })?;
        // The pressure file must exist before the container's programs start.
        if let Err(error) = listener.tell_pressure(actor.node.pressed().iter()) {
            tracing::warn!(
                %key, %error,
                "container {key}: cannot write /.affinode/run/pressure, the file that names the GPUs \
                 on which a container waits for VRAM"
            );
        }
        actor.listeners.insert(key.clone(), listener);
    }
    effects::feed(actor, Input::Announced(Box::new(spec), key.clone()));
    // The state file, too, must exist before the container's programs start.
    hints::write_states(actor);
    Ok(actor.node.annotation_warnings(&key))
}

/// Announces the containers of Podman and CRI-O again after a start of the controller. These
/// containers have no shim that would announce them, so their announcements are stored in their
/// folders.
pub(super) fn recall_containers(actor: &mut NodeActor) {
    for announcement in kept_announcements(&actor.run_dir) {
        let id = announcement.id.clone();
        if let Err(error) = announced(actor, announcement) {
            tracing::error!(id, "container {id}: runs unmanaged: {}", error_chain::chain(&error));
        }
    }
}

/// Handles the withdrawal of a deleted container. Does nothing if the key now belongs to a later
/// container, which has another generation. Generation 0 matches every container.
pub(super) fn withdrawn(actor: &mut NodeActor, key: &str, generation: u64) {
    if let Ok(key) = Key::parse(key)
        && !actor.node.is_of_another(&key, generation)
    {
        withdraw(actor, key);
    }
}

/// Withdraws containers that have ended although no shim has withdrawn them. Does nothing until
/// enough time has passed since the previous scan.
pub(super) fn withdraw_the_gone(actor: &mut NodeActor) {
    if let Some(gone) = actor.sweep.gone(actor.node.deserted(process::lives)) {
        for (key, generation) in gone {
            withdraw(actor, key.clone());
            actor.sweep.remove_folder(&key, generation);
        }
        actor.sockets.tidy();
    }
}

fn withdraw(actor: &mut NodeActor, key: Key) {
    if actor.node.overrides().pinned.contains(&key)
        && let Err(error) =
            overrides::override_with(actor, actor.node.overrides().with_pin(&key, false))
    {
        let error = error_chain::chain(&error);
        tracing::warn!(
            %key,
            "container {key}: ended, but its pin (`affinode pin`) cannot be removed: {error}"
        );
    }
    actor.job_users.remove(&key);
    actor.listeners.remove(&key);
    actor.sockets.forget(&AgentListener::socket(&key));
    effects::feed(actor, Input::Withdrawn(key));
}

/// Maximum size of a stored announcement, in bytes. It is about ten times the size of a large
/// announcement.
const MAX_ANNOUNCEMENT_BYTES: u64 = 256 << 10;

/// Reads the announcements that are stored in the folders of containers. An announcement without
/// the pid of a first process is left out, because its container has not been created.
fn kept_announcements(run_dir: &Path) -> Vec<Announcement> {
    let folders = std::fs::read_dir(run_dir.join(paths::CONTAINERS_DIR));
    let files = folders.into_iter().flatten().flatten().filter_map(|folder| {
        let path = folder.path().join(paths::ANNOUNCEMENT_FILE);
        let mut bytes = Vec::new();
        // Containers of shims have no announcement file.
        File::open(&path).ok()?.take(MAX_ANNOUNCEMENT_BYTES).read_to_end(&mut bytes).ok()?;
        Announcement::parse_from_bytes(&bytes)
            .inspect_err(|error| tracing::error!(%error, "controller: cannot parse the announcement in {}, so its container runs unmanaged", path.display()))
            .ok()
    });
    files.filter(|announcement| announcement.init_pid != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_announcements_of_created_containers() {
        let run_dir = tempfile::tempdir().unwrap();
        let keep = |key: &str, bytes: &[u8]| {
            let folder = run_dir.path().join(paths::CONTAINERS_DIR).join(key);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(paths::ANNOUNCEMENT_FILE), bytes).unwrap();
        };
        assert!(kept_announcements(run_dir.path()).is_empty());
        let created = Announcement { id: "a".into(), init_pid: 7, ..Announcement::default() };
        let preparing = Announcement { id: "b".into(), ..Announcement::default() };
        keep("0", &created.write_to_bytes().unwrap());
        keep("1", &preparing.write_to_bytes().unwrap());
        keep("2", b"\xff\xff");
        std::fs::create_dir(run_dir.path().join(paths::CONTAINERS_DIR).join("3")).unwrap();
        assert_eq!(kept_announcements(run_dir.path()), [created]);
    }
}
