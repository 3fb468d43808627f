//! `affinode run`: runs a program as a job, which the controller manages without a container.

use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, IntoRawFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use affinode_controller::{
    error_chain::chain,
    jobs::{JobReply, JobRequest, SOCKET},
};
use affinode_proto::{installation::InstallationPaths, paths};
use rustix::{fs::FlockOperation, io::FdFlags};

/// Maximum size of the controller's response, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Timeout of each read from and write to the controller's socket.
const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(10);
/// Exit status for a program that exists but cannot be executed. `env` and shells use the same
/// value.
const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

/// Run a program outside a container and let the controller manage its GPU memory, as it does for a
/// container. Such a program is called a job. The controller offloads the memory while the program
/// is idle, and restores it at the program's next CUDA call. The program replaces this command's
/// process, so exit status and signals are those of the program.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Name of the job. Default: the program's name.
    #[arg(long)]
    name: Option<String>,
    /// Namespace of the job. It determines which rules `[[policy.namespace]]` apply. Only root can
    /// choose the namespace. A job of a user other than root is in the namespace user-NAME, where
    /// NAME is the user's name.
    #[arg(long)]
    namespace: Option<String>,
    /// Annotation of the job, without the prefix affinode.io/: for example idle-timeout=2m or
    /// offload=eager. Can be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    annotation: Vec<(String, String)>,
    /// If the controller refuses the job, print the reason and run the program without Affinode.
    #[arg(long)]
    or_unmanaged: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Reason why the program cannot run as a job.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(
        "cannot connect to {socket}: set jobs.enabled in the configuration, and start the \
         controller (systemctl start affinode-controller)"
    )]
    NobodyThere {
        socket: String,
        #[source]
        source: std::io::Error,
    },
    #[error("{0}")]
    Refused(String),
    #[error("cannot read the controller's response")]
    Answer(#[source] std::io::Error),
    #[error("the preload library {0} is missing: install Affinode on this node")]
    NoLibrary(PathBuf),
    #[error("cannot lock {path}, the lock file of the job")]
    Lock {
        path: String,
        #[source]
        source: std::io::Error,
    },
}

/// Registers the job at the controller, and replaces this process by the program. Returns only if
/// the program does not run.
pub fn run(run_dir: &Path, asked: RunArgs) -> ExitCode {
    let mut words = asked.program.iter();
    let program = words.next().cloned().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(words);
    match job(run_dir, &asked, &program) {
        Ok(granted) => {
            command.env(paths::AGENT_SOCKET_ENV, granted.socket);
            command.env("LD_PRELOAD", granted.preload);
        }
        Err(error) if asked.or_unmanaged => {
            say(&format!("running without Affinode: {}", chain(&error)))
        }
        Err(error) => {
            say(&chain(&error));
            return ExitCode::FAILURE;
        }
    }
    let error = command.exec();
    say(&format!("cannot run {}: {error}", program.display()));
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    ExitCode::from(if missing { NOT_FOUND } else { CANNOT_RUN })
}

fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "affinode: {what}");
}

/// Access that the controller has granted to a job: the socket on which the job talks to the
/// controller, and the value of `LD_PRELOAD` that loads Affinode's library.
struct GrantedJob {
    socket: PathBuf,
    preload: OsString,
}

fn job(run_dir: &Path, asked: &RunArgs, program: &OsString) -> Result<GrantedJob, RunError> {
    let library = InstallationPaths::own().lib_dir.join(paths::LIB_FILE);
    if !library.is_file() {
        return Err(RunError::NoLibrary(library));
    }
    let own_name = || {
        let name = Path::new(program).file_name().unwrap_or(program).to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        name.chars().map(|c| if plain(c) { c } else { '_' }).collect()
    };
    let request = JobRequest {
        name: asked.name.clone().unwrap_or_else(own_name),
        namespace: asked.namespace.clone().unwrap_or_default(),
        annotations: asked.annotation.iter().cloned().collect(),
    };
    let (folder, lock) = match ask(&run_dir.join(SOCKET), &request)? {
        JobReply::Granted { folder, lock, warnings } => {
            warnings.iter().for_each(|warning| say(warning));
            (PathBuf::from(folder), lock)
        }
        JobReply::Refused(why) => return Err(RunError::Refused(why)),
    };
    hold(&lock).map_err(|source| RunError::Lock { path: lock, source })?;
    // Affinode's library comes last. A library after it that hooks the driver would bypass the
    // gate, where calls wait while the job is offloaded.
    let mut preload = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    if !preload.is_empty() {
        preload.push(":");
    }
    preload.push(library);
    Ok(GrantedJob { socket: folder.join(paths::AGENT_SOCKET), preload })
}

fn ask(socket: &Path, request: &JobRequest) -> Result<JobReply, RunError> {
    let mut stream = UnixStream::connect(socket)
        .map_err(|source| RunError::NobodyThere { socket: socket.display().to_string(), source })?;
    let mut answer = || -> std::io::Result<JobReply> {
        stream.set_read_timeout(Some(CONTROLLER_TIMEOUT))?;
        stream.set_write_timeout(Some(CONTROLLER_TIMEOUT))?;
        let mut text = serde_json::to_string(request)?;
        text.push('\n');
        // The controller may refuse the job before it has read the request. The request then cannot
        // be written, but there is a response.
        let written = stream.write_all(text.as_bytes());
        let mut line = String::new();
        let read = BufReader::new((&stream).take(MAX_BYTES)).read_line(&mut line);
        if line.is_empty() {
            written.and(read)?;
        }
        Ok(serde_json::from_str(&line)?)
    };
    answer().map_err(RunError::Answer)
}

/// Locks the job's lock file, and keeps the file open when this process executes the program.
/// Descendants of the process inherit the open file. The kernel releases the lock when the last of
/// these processes ends.
fn hold(lock: &str) -> std::io::Result<()> {
    let file = File::open(lock)?;
    rustix::fs::flock(file.as_fd(), FlockOperation::LockShared)?;
    rustix::io::fcntl_setfd(file.as_fd(), FdFlags::empty())?;
    let _ = file.into_raw_fd();
    Ok(())
}
