//! Makes the node's controller use a changed configuration. Some sections apply only when a
//! controller starts. If one of them changed, this module ends the controller. Otherwise the change
//! could take months to apply, because systemd keeps the controller running. Ending a controller is
//! safe, because the next controller continues from the journal.

use std::{fs, io, path::Path, time::Duration};

use affinode_controller::inventory::process;
use affinode_proto::api::{
    control::{ListRequest, ReloadRequest},
    control_ttrpc::ControlClient,
};
use ttrpc::context::with_duration;

/// Time limit for a reply of the controller.
const ANSWER: Duration = Duration::from_secs(10);

/// Reason why a controller did not apply the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// No controller runs, or the controller rejects the configuration.
    #[error("no controller answers, or the controller refuses the configuration")]
    Answer(#[from] ttrpc::Error),
    /// The controller could not be ended.
    #[error("cannot end the controller, process {pid}")]
    End {
        /// Pid of the controller.
        pid: u32,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
}

/// Makes the controller read its configuration again. Some changes take effect only when a
/// controller starts. For such a change, this function ends the controller, and systemd or a shim
/// starts the next one. Returns the pid of the ended controller, or `None` if the controller
/// continues.
///
/// # Errors
/// [`ReloadError`]: the controller continues with the earlier configuration.
pub async fn reload(socket: &Path) -> Result<Option<u32>, ReloadError> {
    let address = format!("unix://{}", socket.display());
    let control = ControlClient::new(ttrpc::r#async::Client::connect(&address).await?);
    let said = control.reload(with_duration(ANSWER), &ReloadRequest::default()).await?;
    if said.waits.is_empty() {
        return Ok(None);
    }
    let pid = control.list(with_duration(ANSWER), &ListRequest::default()).await?.controller_pid;
    let end = || {
        let identity = process::identity(pid)?;
        // The pid is looked up in this container's pid namespace, which must be the node's.
        if !is_controller(pid) {
            let why = "in the agent's pid namespace, this pid belongs to another process: run the \
                       agent in the node's pid namespace";
            return Err(io::Error::other(why));
        }
        process::end(&identity, false)
    };
    end().map_err(|source| ReloadError::End { pid, source })?;
    Ok(Some(pid))
}

fn is_controller(pid: u32) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).nth(1) == Some(b"controller")
}

#[cfg(test)]
mod tests {
    use std::{
        process::{Child, Command, Stdio},
        sync::Arc,
    };

    use affinode_proto::api::{
        control::{ListResponse, ReloadResponse},
        control_ttrpc::{Control, create_control},
    };
    use async_trait::async_trait;
    use ttrpc::r#async::{Server, TtrpcContext};

    use super::*;

    struct FakeController {
        pid: u32,
        waits: Vec<String>,
    }

    #[async_trait]
    impl Control for FakeController {
        async fn reload(
            &self,
            _: &TtrpcContext,
            _: ReloadRequest,
        ) -> ttrpc::Result<ReloadResponse> {
            Ok(ReloadResponse { waits: self.waits.clone(), ..ReloadResponse::default() })
        }

        async fn list(&self, _: &TtrpcContext, _: ListRequest) -> ttrpc::Result<ListResponse> {
            Ok(ListResponse { controller_pid: self.pid, ..ListResponse::default() })
        }
    }

    /// A process that is killed when its test ends.
    struct WaitingProcess(Child);

    impl Drop for WaitingProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Starts a process that waits until it is killed. Its command line is `cat ARGUMENT`.
    fn process_with(folder: &Path, argument: &str) -> WaitingProcess {
        let pipe = folder.join(argument);
        assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        let mut cat = Command::new("cat");
        let cat = cat.arg(argument).current_dir(folder).stdin(Stdio::null());
        let child = cat.stdout(Stdio::null()).spawn().unwrap();
        // `spawn` returns when the kernel has closed the descriptors of the new program, which is
        // just before it sets the command line.
        let command_line = format!("/proc/{}/cmdline", child.id());
        while fs::read(&command_line).unwrap().is_empty() {
            std::thread::yield_now();
        }
        WaitingProcess(child)
    }

    async fn reloaded(child: &WaitingProcess, waits: &[&str]) -> Result<Option<u32>, ReloadError> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let waits = waits.iter().map(|&name| name.to_owned()).collect();
        let service = create_control(Arc::new(FakeController { pid: child.0.id(), waits }));
        let address = format!("unix://{}", socket.display());
        let mut server = Server::new().bind(&address).unwrap().register_service(service);
        server.start().await.unwrap();
        let done = reload(&socket).await;
        server.shutdown().await.unwrap();
        done
    }

    #[tokio::test]
    async fn a_section_that_waits_ends_the_controller() {
        let folder = tempfile::tempdir().unwrap();
        let mut controller = process_with(folder.path(), "controller");
        assert_eq!(reloaded(&controller, &[]).await.unwrap(), None);
        assert!(controller.0.try_wait().unwrap().is_none(), "nothing waits");
        assert_eq!(reloaded(&controller, &["http"]).await.unwrap(), Some(controller.0.id()));
        assert!(!controller.0.wait().unwrap().success());
    }

    #[tokio::test]
    async fn another_process_is_not_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut other = process_with(folder.path(), "other");
        let refused = reloaded(&other, &["http"]).await;
        assert!(matches!(refused, Err(ReloadError::End { .. })), "{refused:?}");
        assert!(other.0.try_wait().unwrap().is_none());
    }
}
