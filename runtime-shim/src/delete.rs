//! The shim's command `delete`: the stock clean-up, and the clean-up after a killed shim.
//!
//! containerd runs `delete` when a shim's connection has ended. containerd 1.x also runs it after
//! every ordinary removal. If the group's proxy has ended, `delete` ends the stock shim behind that
//! proxy. `delete` also deletes the other containers of the group, because containerd 2.x runs
//! `delete` only for the sandbox. All of this takes less than the 5 s that containerd allows.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io};

use tracing::level_filters::LevelFilter;
use tracing::warn;

use crate::address::SocketAddress;
use crate::announce;
use crate::bundle::{Bundle, BundleNote};
use crate::cli::ShimFlags;
use crate::paths::{ShimPaths, container_key};
use crate::probe::{self, ProbedPeer};
use crate::process;
use crate::runc_shim::{RuncShim, RuncShimError};

/// Time limit of the whole command, except for the clean-up of the container itself.
const BUDGET: Duration = Duration::from_millis(4000);
/// Time limit for a proxy's reply to a probe.
const PROXY_REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Pause before the clean-up is repeated for the first time. It doubles each time, up to
/// [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// Maximum wait for the end of a stock shim that was killed.
const END: Duration = Duration::from_secs(1);

/// Reason why `delete` failed.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// The command line names no bundle, and the working folder cannot be determined.
    #[error("cannot determine the container's bundle; pass -bundle")]
    Bundle(#[source] std::io::Error),
    /// The stock shim was not found.
    #[error("cannot run the stock shim")]
    Stock(#[from] RuncShimError),
    /// The stock shim could not be started or waited for.
    #[error("cannot run the stock shim")]
    Run(#[source] std::io::Error),
}

/// Runs the command `delete`. The stock shim's `delete` writes to the stdout and stderr of this
/// process. Returns the exit code of the stock shim's `delete`.
pub fn delete(flags: &ShimFlags, argv: &[OsString]) -> Result<u8, DeleteError> {
    crate::log::init(LevelFilter::WARN);
    let deadline = Instant::now() + BUDGET;
    let bundle = if flags.bundle.is_empty() {
        Bundle::new(std::env::current_dir().map_err(DeleteError::Bundle)?)
    } else {
        Bundle::new(&flags.bundle)
    };
    let stock = RuncShim::find(&flags.publish_binary)?;
    delete_with(&stock, &ShimPaths::own(), flags, argv, &bundle, deadline)
}

fn delete_with(
    stock: &RuncShim,
    paths: &ShimPaths,
    flags: &ShimFlags,
    argv: &[OsString],
    bundle: &Bundle,
    deadline: Instant,
) -> Result<u8, DeleteError> {
    let orphans = match group_note(bundle) {
        Some(note) => end_dead_group(bundle, &note),
        None => BTreeSet::new(),
    };
    let mut own = stock.command(argv).stdin(Stdio::null()).spawn().map_err(DeleteError::Run)?;
    let mut lent = LentBundles::default();
    let children: Vec<(&String, Child)> = orphans
        .iter()
        .filter_map(|id| Some((id, delete_one(stock, flags, bundle, id, &mut lent)?)))
        .collect();
    // containerd kills this process after 5 s, so the container's own clean-up comes first.
    let _ = process::wait(&mut own, deadline);
    for (id, mut child) in children {
        if !process::wait(&mut child, deadline).unwrap_or(false) {
            warn!(
                "container {id}: after the proxy of its pod ended, the stock shim did not delete \
                 the container in time"
            );
        }
    }
    let status = own.wait().map_err(DeleteError::Run)?;
    let own = status.success().then_some(&flags.id);
    let ids = own.into_iter().chain(&orphans).collect();
    delete_what_is_left(stock, flags, bundle, ids, &mut lent, deadline);
    drop(lent);
    // A controller that does not reply must not take the time of the clean-up.
    for id in std::iter::once(&flags.id).chain(&orphans) {
        announce::withdraw(paths, &container_key(&flags.namespace, id), deadline);
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Bundle folders that containerd has removed and this command creates again, empty. runc writes
/// its log into a container's bundle, and fails if the bundle is missing. When this value is
/// dropped, it removes the folders.
#[derive(Default)]
struct LentBundles(BTreeSet<PathBuf>);

impl LentBundles {
    /// Creates an empty bundle folder if it is missing. containerd may remove a bundle at any time
    /// while `delete` runs, so the folder is checked before each attempt to clean up.
    fn lend(&mut self, path: &Path) {
        if fs::create_dir(path).is_ok() {
            self.0.insert(path.to_owned());
        }
    }
}

impl Drop for LentBundles {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = fs::remove_dir_all(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                warn!("cannot remove folder {}: {error}", path.display());
            }
        }
    }
}

/// Returns the record of this bundle, or else the record of the bundle of the group's sandbox.
/// containerd 2.x runs `start` only for the sandbox, so only the sandbox's bundle has a record.
fn group_note(bundle: &Bundle) -> Option<BundleNote> {
    if let Some(note) = bundle.note() {
        return Some(note);
    }
    let address = bundle.recorded_address()?;
    bundle.siblings().iter().filter_map(Bundle::note).find(|note| note.address == address)
}

/// Ends the stock shim of a group whose proxy has ended. Returns the ids of the other containers of
/// the group, which containerd does not clean up because it did not run `start` for them.
fn end_dead_group(bundle: &Bundle, note: &BundleNote) -> BTreeSet<String> {
    let Ok(listen) = SocketAddress::parse(&note.address) else {
        return BTreeSet::new();
    };
    match probe::ask(&listen, PROXY_REPLY_TIMEOUT) {
        ProbedPeer::Dead => {}
        ProbedPeer::Alive(_) => return BTreeSet::new(),
        // The proxy may still serve a running pod. It is better to leak the stock shim than to kill
        // the pod.
        ProbedPeer::Silent(error) => {
            warn!(
                "proxy {listen}: did not reply, so its containers and its stock shim are left \
                 running: {error}"
            );
            return BTreeSet::new();
        }
    }
    if let Err(error) = process::kill(note.shim.pid, note.shim.start_ticks, END) {
        warn!("process {}: cannot end the orphaned stock shim: {error}", note.shim.pid);
    }
    listen.unlink(Some(note.shim.proxy_inode));
    if let Ok(upstream) = SocketAddress::parse(&note.upstream) {
        upstream.unlink(Some(note.shim.socket_inode));
    }
    let served = bundle.members().into_iter();
    let found = bundle.siblings().into_iter().filter_map(|sibling| {
        let ours = sibling.recorded_address().as_deref() == Some(&note.address);
        ours.then(|| sibling.id().map(str::to_owned))?
    });
    served
        .chain(found)
        .filter(|id| bundle.id() != Some(id) && bundle.sibling(id).note().is_none())
        .collect()
}

/// Repeats the clean-up of a container until runc has removed the container's state. runc fails
/// while a process in the cgroup has not ended, and the stock shim does not report that failure.
fn delete_what_is_left(
    stock: &RuncShim,
    flags: &ShimFlags,
    bundle: &Bundle,
    mut ids: Vec<&String>,
    lent: &mut LentBundles,
    deadline: Instant,
) {
    let mut pause = PAUSE;
    loop {
        ids.retain(|id| bundle.runc_state(&flags.namespace, id).exists());
        if ids.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            warn!(
                "containers {ids:?}: runc did not delete them in time; run `runc --root DIR delete --force ID`, where DIR is the parent of the folder {}",
                flags.namespace
            );
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
        for id in &ids {
            if let Some(mut again) = delete_one(stock, flags, bundle, id, lent) {
                let _ = process::wait(&mut again, deadline);
            }
        }
    }
}

fn delete_one(
    stock: &RuncShim,
    flags: &ShimFlags,
    bundle: &Bundle,
    id: &str,
    lent: &mut LentBundles,
) -> Option<Child> {
    let path = bundle.sibling(id).path().to_owned();
    lent.lend(&path);
    let argv: [OsString; 11] = [
        "-namespace".into(),
        flags.namespace.clone().into(),
        "-address".into(),
        flags.address.clone().into(),
        "-publish-binary".into(),
        flags.publish_binary.clone().into(),
        "-id".into(),
        id.into(),
        "-bundle".into(),
        path.clone().into(),
        "delete".into(),
    ];
    stock
        .command(&argv)
        // The stock shim searches for the container's bundle next to its working folder. The
        // working folder is another bundle, because the container's own may be gone.
        .current_dir(bundle.path())
        .stdin(Stdio::null())
        // stdout must contain only the result for the container that containerd named, which is
        // another container.
        .stdout(Stdio::null())
        .spawn()
        .inspect_err(|error| {
            warn!("bundle {}: cannot run the stock shim's delete: {error}", path.display())
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;
    use crate::probe::ShimIdentity;

    /// Creates a sandbox's bundle with its record, and a process in place of the stock shim.
    fn group(dir: &std::path::Path) -> (Bundle, BundleNote, Child) {
        let stock = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = i32::try_from(stock.id()).unwrap();
        let note = BundleNote {
            address: format!("unix://{}/proxy", dir.display()),
            upstream: format!("unix://{}/stock", dir.display()),
            shim: ShimIdentity {
                pid,
                start_ticks: process::start_ticks(pid).unwrap(),
                socket_inode: 0,
                proxy_inode: 0,
            },
        };
        let bundle = Bundle::new(dir.join("pod"));
        fs::create_dir(bundle.path()).unwrap();
        bundle.write_note(&note).unwrap();
        (bundle, note, stock)
    }

    fn record(bundle: &Bundle, address: &str) {
        fs::create_dir(bundle.path()).unwrap();
        let json = format!(r#"{{"version":3,"address":"{address}","protocol":"ttrpc"}}"#);
        fs::write(bundle.path().join("bootstrap.json"), json).unwrap();
    }

    #[test]
    fn dead_group_and_its_stock_shim_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, note, mut stock) = group(dir.path());
        // "gone" has no bundle. "found" is found only by its address.
        bundle.write_members(["pod", "gone"].into_iter()).unwrap();
        record(&bundle.sibling("found"), &note.address);
        // "stranger" belongs to another group. containerd cleans up "started" itself.
        record(&bundle.sibling("stranger"), "unix:///run/other");
        record(&bundle.sibling("started"), &note.address);
        bundle.sibling("started").write_note(&note).unwrap();
        assert_eq!(group_note(&bundle.sibling("found")).unwrap(), note);
        assert_eq!(group_note(&bundle.sibling("stranger")), None);

        let orphans = end_dead_group(&bundle, &note);
        assert_eq!(orphans.into_iter().collect::<Vec<_>>(), ["found", "gone"]);
        assert!(!stock.wait().unwrap().success(), "killed");
    }

    /// containerd removes a container's bundle after `delete` has seen it, and before runc uses it.
    /// `delete` must then create the folder again.
    #[test]
    fn removed_bundle_is_lent_again() {
        const STOCK: &str = r#"#!/bin/sh
            for word; do last=$bundle bundle=$word; done; bundle=$last
            [ -d "$bundle" ] || exit 0
            if [ -e ../raced ]; then rm -r ../runc/ns/pair; else : > ../raced; rm -r "$bundle"; fi
        "#;
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::new(dir.path().join("pod"));
        fs::create_dir(bundle.path()).unwrap();
        let options = format!(r#"{{"root":"{}"}}"#, dir.path().join("runc").display());
        fs::write(bundle.path().join("options.json"), options).unwrap();
        let pair = bundle.sibling("pair");
        fs::create_dir(pair.path()).unwrap();
        let state = bundle.runc_state("ns", "pair");
        fs::create_dir_all(&state).unwrap();
        let stock = RuncShim::script(&dir.path().join("stock"), STOCK);
        let flags = ShimFlags { namespace: "ns".into(), ..ShimFlags::default() };
        let mut lent = LentBundles::default();
        let deadline = Instant::now() + Duration::from_secs(60);
        delete_what_is_left(&stock, &flags, &bundle, vec![&"pair".into()], &mut lent, deadline);
        assert!(!state.exists(), "runc has deleted the container");
        drop(lent);
        assert!(!pair.path().exists(), "the lent folder is gone");
    }

    /// The stock shim deletes the container only at its second attempt. Until then the container
    /// must not be withdrawn, because a controller that does not reply would take the time that the
    /// attempt needs.
    #[test]
    fn containers_are_withdrawn_last() {
        const STOCK: &str = r#"#!/bin/sh
            cd "$(dirname "$0")"
            if [ -d run/containers/* ]; then echo there; else echo withdrawn; fi >> attempts
            if [ -e raced ]; then rm -r runc/ns/pod; else : > raced; fi
        "#;
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::new(dir.path().join("pod"));
        fs::create_dir(bundle.path()).unwrap();
        let options = format!(r#"{{"root":"{}"}}"#, dir.path().join("runc").display());
        fs::write(bundle.path().join("options.json"), options).unwrap();
        fs::create_dir_all(bundle.runc_state("ns", "pod")).unwrap();
        let paths = ShimPaths {
            run_dir: dir.path().join("run"),
            lib_dir: dir.path().join("lib"),
            config: dir.path().join("config.toml"),
        };
        let folder = paths.container(&container_key("ns", "pod"));
        folder.make(1, b"").unwrap();
        let stock = RuncShim::script(&dir.path().join("stock"), STOCK);
        let flags = ShimFlags { namespace: "ns".into(), id: "pod".into(), ..ShimFlags::default() };
        let deadline = Instant::now() + Duration::from_secs(60);
        let argv = ["-id".into(), "pod".into(), "delete".into()];
        let deleted = delete_with(&stock, &paths, &flags, &argv, &bundle, deadline);
        assert_eq!(deleted.unwrap(), 0);
        let attempts = fs::read_to_string(dir.path().join("attempts")).unwrap();
        assert_eq!(attempts, "there\nthere\n");
        assert!(!folder.exists());
    }

    #[test]
    fn a_group_that_may_live_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, note, mut stock) = group(dir.path());
        record(&bundle.sibling("member"), &note.address);
        // The listener accepts connections and never replies.
        let _listener = UnixListener::bind(dir.path().join("proxy")).unwrap();
        assert!(end_dead_group(&bundle, &note).is_empty());
        assert!(stock.try_wait().unwrap().is_none());
        assert!(dir.path().join("proxy").exists());
        stock.kill().unwrap();
        stock.wait().unwrap();
    }
}
