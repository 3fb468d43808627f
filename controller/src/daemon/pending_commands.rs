//! The commands that the core has received and not answered yet.

use std::collections::HashMap;

use affinode_core::CommandId;
use affinode_proto::api::control::ActionResponse;
use tokio::sync::oneshot;

/// Numbers the commands, and keeps the channels of their responses.
#[derive(Debug, Default)]
pub(super) struct PendingCommands {
    channels: HashMap<CommandId, oneshot::Sender<ActionResponse>>,
    last: u64,
}

impl PendingCommands {
    /// Keeps the channel of a new command, and returns the command's number.
    pub(super) fn add(&mut self, channel: oneshot::Sender<ActionResponse>) -> CommandId {
        self.last += 1;
        let command = CommandId(self.last);
        self.channels.insert(command, channel);
        command
    }

    /// The channel of a command, which is no longer pending then.
    pub(super) fn take(&mut self, command: CommandId) -> Option<oneshot::Sender<ActionResponse>> {
        self.channels.remove(&command)
    }
}
