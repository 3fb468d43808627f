//! Reads from files and sockets of a node how Kubernetes assigns the node's GPUs.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read,
    os::fd::AsRawFd,
    path::Path,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use serde::Deserialize;

/// Path of the file in which the kubelet records device plugins, relative to the root directory.
const CHECKPOINT: &str = "var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";
/// Maximum number of bytes that are read from the kubelet's record. On a large node, the record has
/// a few hundred KiB.
const CHECKPOINT_BYTES: u64 = 16 << 20;
/// Folder of the sockets of device plugins.
const PLUGINS: &str = "var/lib/kubelet/device-plugins";
/// Name prefix of the sockets of NVIDIA's device plugin.
const NVIDIA_SOCKET: &str = "nvidia-";
/// Socket of Affinode's device plugin.
const AFFINODE_PLUGIN: &str = "var/lib/kubelet/device-plugins/gpu.affinode.io.sock";
/// Socket of Affinode's DRA driver.
const AFFINODE_DRA: &str = "var/lib/kubelet/plugins/gpu.affinode.io/dra.sock";
/// Folder of the sockets of NVIDIA's DRA driver.
const DRA: &str = "var/lib/kubelet/plugins/gpu.nvidia.com";
/// Maximum number of entries of a folder that are examined as sockets.
const MAX_SOCKETS: usize = 256;
/// Path of the file that HAMi mounts over `/etc/ld.so.preload` of containers.
const HAMI: &str = "usr/local/vgpu/ld.so.preload";
/// Folder with one subfolder for each pod. A subfolder's name consists of the pod's namespace, name
/// and uid.
const PODS: &str = "var/log/pods";
/// Name prefix of the pods with which KAI reserves the GPUs that it shares.
const KAI: &str = "kai-resource-reservation_";

/// Values that the checks of GPU sharing examine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharingFacts {
    /// Devices by resource, as device plugins registered them. `None`: there is no kubelet.
    pub devices: Option<Result<BTreeMap<String, Vec<String>>, String>>,
    /// Number of GPUs that KAI shares.
    pub kai: usize,
    /// Whether NVIDIA's device plugin runs.
    pub nvidia_plugin: bool,
    /// Whether NVIDIA's DRA driver runs.
    pub dra: bool,
    /// Whether Affinode's device plugin runs.
    pub affinode_plugin: bool,
    /// Whether Affinode's DRA driver runs.
    pub affinode_dra: bool,
    /// Whether HAMi's library is installed.
    pub hami: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DevicePluginCheckpoint {
    data: CheckpointData,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct CheckpointData {
    registered_devices: Option<BTreeMap<String, Vec<String>>>,
}

impl SharingFacts {
    /// Reads the values for the checks of GPU sharing from the files below a root directory.
    #[must_use]
    pub fn gather(root: &Path) -> SharingFacts {
        SharingFacts {
            devices: devices(&root.join(CHECKPOINT)),
            kai: names(&root.join(PODS)).filter(|name| name.starts_with(KAI)).count(),
            nvidia_plugin: serves_any(&root.join(PLUGINS), |name| name.starts_with(NVIDIA_SOCKET)),
            dra: serves_any(&root.join(DRA), |_| true),
            affinode_plugin: is_served(&root.join(AFFINODE_PLUGIN)),
            affinode_dra: is_served(&root.join(AFFINODE_DRA)),
            hami: root.join(HAMI).is_file(),
        }
    }
}

/// Returns the names of the entries of a folder.
fn names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Returns whether a program accepts connections at a socket in this folder whose name matches.
fn serves_any(folder: &Path, matches: impl Fn(&str) -> bool) -> bool {
    let sockets = names(folder).filter(|name| name.ends_with(".sock") && matches(name));
    sockets.take(MAX_SOCKETS).any(|name| is_served(&folder.join(name)))
}

/// Returns whether a program accepts connections at this socket. The file alone is no proof,
/// because a killed program does not remove its socket.
fn is_served(path: &Path) -> bool {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return false };
    let Ok(folder) = File::open(folder) else { return false };
    // The address of a socket has at most 107 bytes, but the path to the root may be long.
    let short = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let connected = socket.and_then(|socket| connect(&socket, &SocketAddrUnix::new(&short)?));
    // AGAIN: the program listens, but does not accept connections at the moment. ACCESS: this
    // process has no right to connect, and a socket without a program is refused with another error.
    matches!(connected, Ok(()) | Err(Errno::AGAIN | Errno::ACCESS))
}

fn devices(path: &Path) -> Option<Result<BTreeMap<String, Vec<String>>, String>> {
    // Without a kubelet, or if this process is not root, the record cannot be read.
    let file = File::open(path).ok()?;
    let mut text = Vec::new();
    let read = file.take(CHECKPOINT_BYTES).read_to_end(&mut text);
    let parsed = read.map_err(|error| error.to_string()).and_then(|_| {
        serde_json::from_slice::<DevicePluginCheckpoint>(&text).map_err(|error| error.to_string())
    });
    Some(
        parsed
            .map(|checkpoint| checkpoint.data.registered_devices.unwrap_or_default())
            .map_err(|why| format!("{}: {why}", path.display())),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_on_a_node_is_found() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(SharingFacts::gather(root.path()), SharingFacts::default());
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let bind = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            UnixListener::bind(path).unwrap()
        };
        write(
            CHECKPOINT,
            r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a::1"]},"AllocResp":"Cg=="}],"RegisteredDevices":{"nvidia.com/gpu":["GPU-a::0","GPU-a::1"]}},"Checksum":3251223}"#,
        );
        write(HAMI, "/usr/local/vgpu/libvgpu.so");
        let _nvidia = bind("var/lib/kubelet/device-plugins/nvidia-gpu.sock");
        let _nvidia_dra = bind("var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock");
        let _plugin = bind(AFFINODE_PLUGIN);
        // The driver has ended, and its socket is left.
        drop(bind(AFFINODE_DRA));
        for pod in ["kai-resource-reservation_gpu-reservation-1_ab", "ml_a_b"] {
            fs::create_dir_all(root.path().join(PODS).join(pod)).unwrap();
        }
        let ids = vec!["GPU-a::0".to_owned(), "GPU-a::1".to_owned()];
        let expected = SharingFacts {
            devices: Some(Ok(BTreeMap::from([("nvidia.com/gpu".to_owned(), ids)]))),
            kai: 1,
            nvidia_plugin: true,
            dra: true,
            affinode_plugin: true,
            affinode_dra: false,
            hami: true,
        };
        assert_eq!(SharingFacts::gather(root.path()), expected);
        write(CHECKPOINT, "half a fi");
        assert!(SharingFacts::gather(root.path()).devices.unwrap().is_err());
    }

    #[test]
    fn left_sockets_are_no_programs() {
        let root = tempfile::tempdir().unwrap();
        // Longer than the address of a socket.
        let deep = root.path().join("x".repeat(200));
        let plugins = deep.join(PLUGINS);
        for folder in [&plugins, &deep.join(DRA)] {
            fs::create_dir_all(folder).unwrap();
        }
        let here = root.path().join("s");
        drop(UnixListener::bind(&here).unwrap());
        fs::rename(&here, plugins.join("nvidia-gpu.sock")).unwrap();
        assert_eq!(SharingFacts::gather(&deep), SharingFacts::default());
        let _listener = UnixListener::bind(&here).unwrap();
        fs::rename(&here, plugins.join("nvidia-gpu.sock")).unwrap();
        assert!(SharingFacts::gather(&deep).nvidia_plugin);
    }
}
