//! `delete`: the stock clean-up, and what a killed shim leaves behind.
//!
//! containerd runs it when a shim's connection has ended, in 1.x also after every
//! ordinary removal. If the group's proxy is gone, its stock shim is ended, and
//! the other containers of the group are deleted too: containerd 2.x asks for
//! the sandbox alone. All of it fits in the 5 s that containerd allows.

use std::ffi::OsString;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing::warn;

use crate::address::Address;
use crate::announce;
use crate::bundle::{Bundle, Note};
use crate::cli::Flags;
use crate::paths::{Paths, container_key};
use crate::peer::{self, Peer};
use crate::process;
use crate::stock::{Stock, StockError};

/// Until when everything but the container's own clean-up must be done.
const BUDGET: Duration = Duration::from_millis(4000);
/// How long a proxy may take to say that it lives.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a killed stock shim may take to end.
const END: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

/// `delete` failed.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// No bundle is named and there is no working folder.
    #[error("cannot find the bundle")]
    Bundle(#[source] std::io::Error),
    /// The stock shim.
    #[error("cannot run the stock shim")]
    Stock(#[from] StockError),
    /// It could not be started or waited for.
    #[error("cannot run the stock shim")]
    Run(#[source] std::io::Error),
}

/// Runs `delete`. stdout and stderr are the stock shim's; returns its exit code.
pub fn delete(flags: &Flags, argv: &[OsString]) -> Result<u8, DeleteError> {
    crate::log::init(LevelFilter::WARN);
    let deadline = Instant::now() + BUDGET;
    let bundle = if flags.bundle.is_empty() {
        Bundle::new(std::env::current_dir().map_err(DeleteError::Bundle)?)
    } else {
        Bundle::new(&flags.bundle)
    };
    let stock = Stock::find(&flags.publish_binary)?;
    let orphans = match group_note(&bundle) {
        Some(note) => end_dead_group(&bundle, &note),
        None => Vec::new(),
    };
    let own = stock.command(argv).stdin(Stdio::null()).spawn().map_err(DeleteError::Run)?;
    let children: Vec<(Bundle, Child)> = orphans
        .into_iter()
        .filter_map(|orphan| Some((orphan.clone(), delete_orphan(&stock, flags, &orphan)?)))
        .collect();
    let code = wait_own(own)?;
    let paths = Paths::from_env();
    announce::withdraw(&paths, &container_key(&flags.namespace, &flags.id));
    for (orphan, child) in children {
        let id = orphan.id().unwrap_or_default();
        if !wait_until(child, deadline) {
            warn!(id, "container of the dead shim's group could not be deleted in time");
        }
        announce::withdraw(&paths, &container_key(&flags.namespace, id));
    }
    Ok(code)
}

/// The note of this bundle, or that of its group's sandbox: 2.x runs `start` for
/// the sandbox alone.
fn group_note(bundle: &Bundle) -> Option<Note> {
    if let Some(note) = bundle.note() {
        return Some(note);
    }
    let address = bundle.recorded_address()?;
    bundle.siblings().iter().filter_map(Bundle::note).find(|note| note.address == address)
}

/// If the group's proxy is gone, ends its stock shim and returns the bundles of
/// its other containers.
fn end_dead_group(bundle: &Bundle, note: &Note) -> Vec<Bundle> {
    let Ok(listen) = Address::parse(&note.address) else {
        return Vec::new();
    };
    match peer::ask(&listen, PATIENCE) {
        Peer::Dead => {}
        Peer::Alive(_) => return Vec::new(),
        // Rather a leak than the death of a pod that lives.
        Peer::Silent(error) => {
            warn!("the proxy at {listen} does not answer, its group is left alone: {error}");
            return Vec::new();
        }
    }
    if let Err(error) = process::kill(note.shim.pid, note.shim.start_ticks, END) {
        warn!(pid = note.shim.pid, "cannot end the orphaned stock shim: {error}");
    }
    listen.unlink(Some(note.shim.proxy_inode));
    if let Ok(upstream) = Address::parse(&note.upstream) {
        upstream.unlink(Some(note.shim.socket_inode));
    }
    bundle
        .siblings()
        .into_iter()
        .filter(|sibling| sibling.recorded_address().as_deref() == Some(&note.address))
        .collect()
}

fn delete_orphan(stock: &Stock, flags: &Flags, orphan: &Bundle) -> Option<Child> {
    let path = orphan.path().as_os_str();
    let argv: [OsString; 11] = [
        "-namespace".into(),
        flags.namespace.clone().into(),
        "-address".into(),
        flags.address.clone().into(),
        "-publish-binary".into(),
        flags.publish_binary.clone().into(),
        "-id".into(),
        orphan.id()?.into(),
        "-bundle".into(),
        path.into(),
        "delete".into(),
    ];
    stock
        .command(&argv)
        .current_dir(path)
        .stdin(Stdio::null())
        // The answer on stdout is about the container that was asked for.
        .stdout(Stdio::null())
        .spawn()
        .inspect_err(|error| warn!("cannot delete {}: {error}", orphan.path().display()))
        .ok()
}

fn wait_own(mut child: Child) -> Result<u8, DeleteError> {
    let status = child.wait().map_err(DeleteError::Run)?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn wait_until(mut child: Child, deadline: Instant) -> bool {
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(PAUSE),
            Ok(Some(status)) => return status.success(),
            Err(_) => return false,
        }
    }
    // Reaped by init, which takes this process's children in a moment.
    let _ = child.kill();
    false
}
