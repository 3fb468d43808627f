//! The containerd shim of Affinode: a proxy between containerd and the stock shim,
//! `containerd-shim-runc-v2`, that forwards ttrpc frames.
//!
//! ```text
//! containerd ── start ──> start ── runs ──> stock start ──> stock shim (its socket)
//!                           │                                    ^
//!                           └─ spawns ─> serve (our socket) ─────┘ one connection upstream per client
//! containerd ═══ ttrpc ══════════════════> serve: every frame untouched but Create
//!                                            ├─ edits config.json of GPU containers
//!                                            └─ announces them to the controller, keeps it alive
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | [`cli`] | Go-style flags and the action |
//! | [`start`], [`delete`], [`info`] | the commands containerd runs, each a short process |
//! | [`serve`] | the daemon of a pod: accepts, proxies, ends with the stock shim |
//! | [`proxy`], [`frame`] | one connection: frames copied in order, Create and Delete decoded |
//! | [`containers`], [`create`] | handling of a Create: options translated, config.json edited, container announced |
//! | [`bootstrap`], [`options`] | the wire forms of containerd 1.6 to 2.3 |
//! | [`spec`], [`rootfs`], [`ld_so_preload`] | the edit: GPU detection, the image's preload list, the added mounts |
//! | [`metadata`], [`claim_policy`] | names and policy of a container |
//! | [`announce`], [`launch`] | announcing containers to the controller, and starting it |
//! | [`oci`] | `affinode-runtime`: the same edit for container engines without shims |
//!
//! A container without a GPU passes through unedited. A container with a GPU runs unedited if the
//! edit would not be safe.

#![forbid(unsafe_code)]
// A function that fits on one screen can be read at once.
#![cfg_attr(not(test), deny(clippy::too_many_lines))]

pub mod address;
pub mod announce;
pub mod bootstrap;
pub mod bundle;
pub mod cgroup;
pub mod claim_policy;
pub mod cli;
pub mod containers;
pub mod create;
pub mod delete;
pub mod docker;
pub mod frame;
pub mod info;
pub mod launch;
pub mod ld_so_preload;
pub mod log;
pub mod metadata;
pub mod oci;
pub mod options;
pub mod paths;
pub mod probe;
pub mod process;
pub mod proxy;
pub mod rootfs;
pub mod rpc;
pub mod runc_shim;
pub mod serve;
pub mod spec;
pub mod start;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use affinode_proto::api::control::Announcement;
use affinode_proto::wire::StartSettings;
use cli::{ShimAction, ShimInvocation};

/// The name under which containerd knows this runtime.
pub const RUNTIME: &str = "io.containerd.affinode.v1";
/// The name of this binary. containerd derives it from [`RUNTIME`].
pub const BINARY: &str = "containerd-shim-affinode-v1";

/// A program that is built into this binary: its subcommand, and its main function. The function
/// gets the program's name and the arguments after the subcommand.
pub type Embedded = (&'static str, fn(Vec<OsString>) -> ExitCode);

/// Function that returns the settings that the processes of an announced container need at their
/// start, from the node's configuration.
pub type StartSettingsOf = fn(&Path, &Announcement) -> StartSettings;

/// Runs the command that the arguments name. The first of `args` is the program's name.
pub fn run(
    args: impl Iterator<Item = OsString>,
    embedded: &[Embedded],
    start_settings_of: StartSettingsOf,
) -> ExitCode {
    let mut args: Vec<OsString> = args.collect();
    let named = |(name, _): &&Embedded| args.get(1).is_some_and(|first| first == name);
    if let Some((_, main)) = embedded.iter().find(named) {
        args.remove(1);
        return main(args);
    }
    if args.get(1).is_some_and(|first| first == "launch") {
        return finish(launch::launch().map_err(Box::from));
    }
    let argv: Vec<OsString> = args.into_iter().skip(1).collect();
    let invocation = match ShimInvocation::parse(&argv) {
        Ok(invocation) => invocation,
        Err(error) => {
            fail(&report(&error));
            return ExitCode::from(2);
        }
    };
    let flags = &invocation.flags;
    match invocation.action {
        ShimAction::Version => finish(print(version().as_bytes()).map_err(Box::from)),
        ShimAction::Info => answer(info::info(flags, &argv).map_err(Box::from)),
        ShimAction::Start => answer(start::start(flags, &argv).map_err(Box::from)),
        ShimAction::Delete => match delete::delete(flags, &argv) {
            Ok(code) => ExitCode::from(code),
            Err(error) => fail(&report(&error)),
        },
        ShimAction::Serve => serve::main(flags, start_settings_of),
    }
}

type Failure = Box<dyn std::error::Error>;

fn answer(result: Result<Vec<u8>, Failure>) -> ExitCode {
    finish(result.and_then(|bytes| print(&bytes).map_err(Box::from)))
}

fn finish(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&report(error.as_ref())),
    }
}

/// Prints an error to stderr, which containerd reports.
pub fn fail(text: &str) -> ExitCode {
    fail_as(BINARY, text)
}

/// Like [`fail`], but with the name of another program.
fn fail_as(program: &str, text: &str) -> ExitCode {
    // If stderr is closed too, there is no other place for the error.
    let _ = writeln!(std::io::stderr(), "{program}: {text}");
    ExitCode::FAILURE
}

/// Formats an error for operators in one line: the error, then each cause after a colon.
#[must_use]
pub fn report(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn print(bytes: &[u8]) -> std::io::Result<()> {
    let mut stdout = std::io::stdout();
    stdout.write_all(bytes)?;
    stdout.flush()
}

fn version() -> String {
    format!("{BINARY}:\n  Version:  {}\n  Runtime:  {RUNTIME}\n", env!("CARGO_PKG_VERSION"))
}
