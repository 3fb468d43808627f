//! Main loop of the host pool: reads the controller's orders and carries them out.

use std::{os::fd::OwnedFd, sync::Arc};

use affinode_proto::wire::host_pool::HostPoolOrder;

use crate::{HostPoolError, pool::Pool, socket};

/// Serves until the controller closes its socket.
///
/// # Errors
/// [`HostPoolError::Io`]: the socket failed. [`HostPoolError::Frame`]: an order is invalid.
pub fn run(controller: OwnedFd, pool: &Arc<Pool>) -> Result<(), HostPoolError> {
    let result = obey(&controller, pool);
    pool.stop();
    result
}

fn obey(controller: &OwnedFd, pool: &Arc<Pool>) -> Result<(), HostPoolError> {
    while let Some((frame, descriptor)) = socket::receive_with_descriptor(controller)? {
        match HostPoolOrder::decode(&frame)? {
            HostPoolOrder::Attach { process, container } => {
                let Some(socket) = descriptor else {
                    tracing::warn!(
                        "process {process}: cannot use the host pool, because the controller sent \
                         no socket for the process"
                    );
                    continue;
                };
                if let Err(error) = pool.attach(process, container, socket) {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(error, "process {process}: cannot use the host pool");
                }
            }
            HostPoolOrder::Allow { process, bytes, kept_bytes } => {
                if let Err(error) = pool.allow(process, bytes, kept_bytes) {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(
                        error,
                        "process {process}: cannot set the limit of its memory file to {bytes} \
                         bytes"
                    );
                }
            }
            HostPoolOrder::AllowDisk { process, bytes } => pool.allow_disk(process, bytes),
            HostPoolOrder::Detach { process } => pool.detach(process),
        }
    }
    Ok(())
}
