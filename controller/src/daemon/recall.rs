//! Restores the state that an earlier controller stored on disk: operator overrides, journal
//! records, jobs and containers.

use affinode_core::{Input, JournalStep, event::NodeEvent};
use affinode_proto::{event::EventKind, paths, reason::Reason};

use super::{
    DaemonError,
    actor::{NodeActor, memory_rules},
    containers, effects, jobs,
};
use crate::{
    clock::unix_ms,
    conversion,
    inventory::{memory, process},
    overrides,
};

/// Reads the state that an earlier controller stored, and passes it to the core. This happens
/// before any socket is served.
pub(super) fn recall(actor: &mut NodeActor) -> Result<(), DaemonError> {
    if let Ok(own) = process::identity(std::process::id()) {
        effects::feed(actor, Input::Started(own.start_ticks));
    }
    recall_overrides(actor);
    // The journal is read before any socket is served. A restore that the earlier controller
    // ordered may still be running, and its VRAM must not be promised to another container.
    let folder = actor.run_dir.join(paths::JOURNAL_DIR);
    recall_moves(actor).map_err(DaemonError::file("cannot read", &folder))?;
    jobs::recall_jobs(actor);
    containers::recall_containers(actor);
    Ok(())
}

/// Applies the operator overrides of the earlier controller.
fn recall_overrides(actor: &mut NodeActor) {
    let (overrides, why_off) = overrides::recall(&actor.run_dir);
    effects::feed(actor, Input::Overridden(overrides));
    if let Some(text) = why_off {
        tracing::error!("controller: {text}");
        let event = NodeEvent::new(EventKind::Request, text).because(Reason::AutoOff);
        actor.events.add(conversion::event_of(event), unix_ms());
    }
}

/// Reads the journal of an earlier controller, and informs the core of each offloaded process that
/// still runs.
fn recall_moves(actor: &mut NodeActor) -> std::io::Result<()> {
    let (records, bad) = actor.journal.read_all()?;
    for why in bad {
        tracing::warn!("controller: a journal record is invalid and is ignored: {why}");
    }
    for (key, record) in records {
        actor.unclaimed.add(key.clone(), &record);
        let restoring = record.step == JournalStep::Restore;
        for process in record.processes {
            let identity = (process.pid, process.start_ticks);
            // A process that has ended is not recalled, even if another process has its pid now.
            let lives = process::lives(process.pid, process.start_ticks);
            if lives {
                let bytes = process.offloaded.iter().map(|on| on.bytes).sum();
                let host = memory::pools_of(memory_rules(&actor.config), process.pid, bytes);
                let recalled = Input::Recalled {
                    key: key.clone(),
                    identity,
                    offloaded: process.offloaded,
                    to: process.to,
                    restoring,
                    host,
                };
                effects::feed(actor, recalled);
            }
        }
    }
    Ok(())
}
