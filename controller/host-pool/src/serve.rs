//! Main loop of the host pool: reads the controller's orders and carries them out.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::Arc,
};

use affinode_proto::wire::host_pool::{HostPoolOrder, HostPoolReport};

use crate::{HostPoolError, pool::Pool, ready::Wanted, socket};

/// Serves until the controller closes its socket.
///
/// # Errors
/// [`HostPoolError::Io`]: the socket failed. [`HostPoolError::Frame`]: an order is invalid.
pub fn run(controller: OwnedFd, pool: &Arc<Pool>) -> Result<(), HostPoolError> {
    let result = start_ready(&controller, pool).and_then(|()| obey(&controller, pool));
    pool.stop();
    result
}

/// Starts the thread that keeps memory files ready. It reports their memory to the controller.
fn start_ready(controller: &OwnedFd, pool: &Arc<Pool>) -> Result<(), HostPoolError> {
    let controller = controller.try_clone()?;
    Ok(pool.start_ready(move |bytes| {
        let report = HostPoolReport::Ready { bytes }.encode();
        socket::send(&controller, &report, None::<BorrowedFd<'_>>).is_ok()
    })?)
}

fn obey(controller: &OwnedFd, pool: &Arc<Pool>) -> Result<(), HostPoolError> {
    while let Some((frame, descriptor)) = socket::receive_with_descriptor(controller)? {
        match HostPoolOrder::decode(&frame)? {
            HostPoolOrder::Attach { process, bytes } => {
                let Some(socket) = descriptor else {
                    tracing::warn!(
                        "process {process}: cannot use the host pool, because the controller sent \
                         no socket for the process"
                    );
                    continue;
                };
                if let Err(error) = pool.attach(process, bytes, socket) {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "process {process}: cannot use the host pool");
                }
            }
            HostPoolOrder::Allow { process, bytes } => {
                if let Err(error) = pool.allow(process, bytes) {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(
                        error,
                        "process {process}: cannot set the limit of its memory file to {bytes} \
                         bytes"
                    );
                }
            }
            HostPoolOrder::Detach { process } => drop(pool.detach(process)),
            HostPoolOrder::KeepReady { sizes, min_available_bytes, max_bytes } => {
                pool.keep_ready(Wanted { sizes, min_available_bytes, max_bytes });
            }
        }
    }
    Ok(())
}
