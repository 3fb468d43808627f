//! Stores the commands that the core has received and not answered yet.

use std::collections::HashMap;

use affinode_core::CommandId;
use affinode_proto::api::control::ActionResponse;
use tokio::sync::oneshot;

/// Assigns numbers to commands, and stores the channels for their responses.
#[derive(Debug, Default)]
pub(super) struct PendingCommands {
    channels: HashMap<CommandId, oneshot::Sender<ActionResponse>>,
    last: u64,
}

impl PendingCommands {
    /// Adds a new command with the channel for its response. Returns the command's number.
    pub(super) fn add(&mut self, channel: oneshot::Sender<ActionResponse>) -> CommandId {
        self.last += 1;
        let command = CommandId(self.last);
        self.channels.insert(command, channel);
        command
    }

    /// Removes a command and returns the channel for its response.
    pub(super) fn take(&mut self, command: CommandId) -> Option<oneshot::Sender<ActionResponse>> {
        self.channels.remove(&command)
    }
}
