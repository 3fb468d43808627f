//! Texts for users that several parts of the core need.

use affinode_proto::reason::Reason;

/// The text of a reason, followed by the detail if there is one.
#[must_use]
pub fn text_of(reason: Reason, detail: &str) -> String {
    if detail.is_empty() {
        reason.sentence().to_owned()
    } else {
        format!("{}: {detail}", reason.sentence())
    }
}

/// An amount of memory in GiB. 0: the amount is unknown.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        0 => "unknown size".into(),
        bytes => format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// Text of the warning about a process whose memory could not be copied.
pub(super) fn copy_failed_text(pid: u32) -> String {
    format!(
        "the memory of process {pid} could not be copied: the driver's checkpoint moves it instead"
    )
}

/// Text of the warning about a container whose VRAM limit the driver could enforce, but does not.
pub(super) fn no_driver_limit_text(why: &str) -> String {
    format!(
        "only the library enforces the VRAM limit, because the driver's limit cannot be changed: {why}"
    )
}

/// Text of the warning about a process that could not export memory as an IPC handle, and what to
/// do.
pub(super) fn ipc_refused_text(pid: u32) -> String {
    format!(
        "process {pid} could not export an IPC handle of its memory, because a copier restored the memory: set the annotation affinode.io/engine to copy or checkpoint"
    )
}

/// Text of the event about a process that calls the driver without the library's hooks.
pub(super) fn hidden_text(pid: u32) -> String {
    format!(
        "a thread of process {pid} called the driver without the library's hooks, and this call \
         blocked. Therefore the process was restored, and its context stays on the GPU from now on"
    )
}

/// Text of the warning about a process whose restored memory differs from the offloaded memory, and
/// what to do.
pub(super) fn damaged_text(pid: u32) -> String {
    format!(
        "the memory of process {pid} differs after a restore: the process wrote out of bounds, or \
         host memory or the bus failed. Its CUDA calls fail from now on; restart it"
    )
}
