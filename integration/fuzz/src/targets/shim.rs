//! Fuzz targets for input of the shim: ttrpc messages of containerd and of the stock shim,
//! container specs, and files of images.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use affinode_shim::{
    bootstrap::{BootstrapInput, BootstrapReply},
    docker,
    frame::HEADER_BYTES,
    ld_so_preload::merge,
    options,
    proxy::{self, TaskService},
    spec::{self, BindMount},
};
use containerd_shim_protos::{api::CreateTaskRequest, protobuf::well_known_types::any::Any};
use serde_json::Value;
use tokio::io::{AsyncRead, ReadBuf};

/// A simulated peer of a connection that sends bytes in pieces. Between two pieces it lets other
/// tasks run.
struct Peer<'a> {
    left: &'a [u8],
    waited: bool,
}

impl AsyncRead for Peer<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.waited = !self.waited;
        if self.waited {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let taken = self.left.len().min(buffer.remaining()).min(64);
        let (now, later) = self.left.split_at(taken);
        buffer.put_slice(now);
        self.left = later;
        Poll::Ready(Ok(()))
    }
}

struct Untouched;

impl TaskService for Untouched {
    async fn create(&self, _: &CreateTaskRequest) -> Option<Any> {
        None
    }
    fn created(&self, _: &str, _: bool) {}
    fn deleted(&self, _: &str) {}
}

/// Connects a simulated client and a simulated stock shim through the shim's ttrpc proxy. The first
/// byte of the input determines how the other bytes are divided between the two. In this target,
/// the proxy is set up to change no message. Each side must therefore receive the bytes of the
/// other side unchanged.
pub fn ttrpc(data: &[u8]) {
    let Some((share, data)) = data.split_first() else { return };
    let (client, stock) = data.split_at(data.len() * usize::from(*share) / 255);
    let Some((first, rest)) = client.split_first_chunk::<HEADER_BYTES>() else { return };
    let (mut to_client, mut to_stock) = (Vec::new(), Vec::new());
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let Ok(runtime) = runtime else { return };
    let run = proxy::run(
        *first,
        (Peer { left: rest, waited: false }, &mut to_client),
        (Peer { left: stock, waited: false }, &mut to_stock),
        &Untouched,
    );
    let _ = runtime.block_on(run);
    assert!(client.starts_with(&to_stock), "the stock shim got other bytes");
    assert!(stock.starts_with(&to_client), "the client got other bytes");
}

/// Parses the input of the shim's command `start`, which containerd sends, and the reply of the
/// stock shim's `start`. If the address in a reply is replaced, the new address must be found when
/// the reply is parsed again.
pub fn start(data: &[u8]) {
    let _ = BootstrapInput::parse(data, "default", "id");
    if let Ok(answer) = BootstrapReply::parse(data) {
        assert!(!answer.address().is_empty());
        let _ = answer.task_version();
        let ours = "unix:///run/affinode/s/0";
        let Ok(written) = answer.with_address(ours) else { return };
        let read = BootstrapReply::parse(&written);
        assert!(read.is_ok_and(|answer| answer.address() == ours), "the new address is lost");
    }
}

/// Edits a container's config.json as the shim does. Only mounts may be added, and a second edit
/// must change nothing.
pub fn spec(data: &[u8]) {
    let Ok(before) = serde_json::from_slice::<Value>(data) else { return };
    let _ = (spec::decide(&before), spec::cgroups_path(&before), spec::root_path(&before));
    let mounts = [
        ("/usr/local/lib/affinode", "/.affinode/lib"),
        ("/run/affinode/containers/0/ld.so.preload", "/etc/ld.so.preload"),
    ]
    .map(|(source, destination)| BindMount {
        source: source.into(),
        destination,
        options: &["bind", "ro"],
    });
    let mut edited = before.clone();
    if spec::add_mounts(&mut edited, &mounts).is_err() {
        // A refused edit may have removed Affinode's earlier mounts, so the spec is not compared.
        return;
    }
    let listed = edited["mounts"].as_array().map_or(0, Vec::len);
    assert!(listed >= mounts.len());
    let mut again = edited.clone();
    assert!(
        spec::add_mounts(&mut again, &mounts).is_ok() && again == edited,
        "a second edit changed the spec"
    );
    let without = |mut value: Value| {
        if let Some(object) = value.as_object_mut() {
            object.shift_remove("mounts");
        }
        value
    };
    assert_eq!(without(edited), without(before), "the edit changed more than the mounts");
}

/// Edits an image's `/etc/ld.so.preload` as the shim does. Affinode's line must be added once, and
/// the image's own lines must be kept.
pub fn preload(data: &[u8]) {
    let merged = merge(data);
    assert!(merged.starts_with(data));
    assert_eq!(merge(&merged), merged);
}

/// Translates the runtime options that containerd passes to the shim. The first byte of the input
/// selects their type. The options must be translated to runc's options, or refused with a reason.
/// A second translation must change nothing.
pub fn options(data: &[u8]) {
    /// First byte of the field of `runtimeoptions.v1.Options` that contains the path of a file on
    /// the node. This target must not read such a file, so it skips options that contain this byte.
    const CONFIG_PATH: u8 = 0x12;
    let Some((kind, value)) = data.split_first() else { return };
    let mut any = Any::new();
    any.type_url = match kind % 3 {
        0 if value.contains(&CONFIG_PATH) => return,
        0 => "runtimeoptions.v1.Options".to_owned(),
        1 => options::RUNC_OPTIONS.to_owned(),
        _ => String::from_utf8_lossy(value).into_owned(),
    };
    any.value = value.to_vec();
    if let Some(path) = options::shim_cgroup(Some(&any)) {
        assert!(!path.is_empty());
    }
    for cgroups_path in [None, Some("system.slice:cri:x"), std::str::from_utf8(value).ok()] {
        match options::translate(Some(&any), cgroups_path) {
            Ok(None) => {}
            Ok(Some(given)) => {
                assert_eq!(given.type_url, options::RUNC_OPTIONS);
                let again = options::translate(Some(&given), cgroups_path);
                assert!(matches!(again, Ok(None)), "options of runc are translated again");
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

/// Parses the file in which Docker describes a container. Each name that is read from it must be
/// safe to print on a terminal and limited in length. Otherwise the name must be absent.
pub fn docker(data: &[u8]) {
    let Ok(names) = docker::parse(data) else { return };
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(&byte);
    assert!(!names.container.is_empty() && names.container.bytes().all(safe));
    assert!(names.container.len() < 300 && names.container.split('/').count() <= 2);
    assert!(names.image.len() < 1_000 && names.image.bytes().all(|byte| byte.is_ascii_graphic()));
}
