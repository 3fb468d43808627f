//! Checks of how Kubernetes assigns the GPUs of this node: whether other pods can use the VRAM that
//! an offloaded container frees.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, Read},
    os::unix::net::UnixStream,
    path::Path,
};

use serde::Deserialize;

use super::{CheckGroup, DoctorCheck};

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
/// Folder of NVIDIA's DRA driver.
const DRA: &str = "var/lib/kubelet/plugins/gpu.nvidia.com";
/// Path of the file that HAMi mounts over `/etc/ld.so.preload` of containers.
const HAMI: &str = "usr/local/vgpu/ld.so.preload";
/// Folder with one subfolder for each pod. A subfolder's name consists of the pod's namespace, name
/// and uid.
const PODS: &str = "var/log/pods";
/// Name prefix of the pods with which KAI reserves the GPUs that it shares.
const KAI: &str = "kai-resource-reservation_";
/// Resource name of whole GPUs in Kubernetes.
const GPU: &str = "nvidia.com/gpu";
/// Prefix of the resource names of MIG instances in Kubernetes.
const MIG: &str = "nvidia.com/mig-";
/// Folder of this repository with examples of GPU sharing in Kubernetes.
const EXAMPLES: &str = "config/kubernetes/sharing";

/// Values that the checks of GPU sharing examine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharingFacts {
    /// Devices by resource, as device plugins registered them. `None`: there is no kubelet.
    pub devices: Option<Result<BTreeMap<String, Vec<String>>, String>>,
    /// Number of GPUs that KAI shares.
    pub kai: usize,
    /// Whether NVIDIA's device plugin runs.
    pub nvidia_plugin: bool,
    /// Whether NVIDIA's DRA driver is installed.
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
            kai: count(&root.join(PODS), KAI),
            nvidia_plugin: count(&root.join(PLUGINS), NVIDIA_SOCKET) > 0,
            dra: root.join(DRA).is_dir(),
            affinode_plugin: is_served(&root.join(AFFINODE_PLUGIN)),
            affinode_dra: is_served(&root.join(AFFINODE_DRA)),
            hami: root.join(HAMI).is_file(),
        }
    }
}

/// Returns whether a program accepts connections at this socket. The file alone is no proof,
/// because a killed program does not remove its socket.
fn is_served(path: &Path) -> bool {
    // Without root's rights the connection is refused, but not with this error.
    match UnixStream::connect(path) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    }
}

/// Counts the entries of a folder whose names have this prefix.
fn count(folder: &Path, prefix: &str) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)).count()
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

/// Returns the checks of GPU sharing. On a machine without Kubernetes, the list is empty.
#[must_use]
pub fn judge(facts: &SharingFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("Kubernetes");
    match &facts.devices {
        Some(Ok(devices)) => {
            let shared_otherwise = facts.kai > 0 || facts.hami || facts.affinode_dra;
            for (resource, ids) in devices.iter().filter(|(_, ids)| !ids.is_empty()) {
                judge_resource(&mut group, resource, ids, shared_otherwise);
            }
        }
        Some(Err(why)) => {
            let hint = "restart the kubelet, which writes this file again: without the file it is unknown how GPUs are shared";
            group.warning("sharing", why.clone(), hint);
        }
        None => {}
    }
    if facts.kai > 0 {
        let s = if facts.kai == 1 { "" } else { "s" };
        group.good("KAI", format!("KAI assigns fractions of {} GPU{s}", facts.kai));
    }
    if facts.dra {
        let found = "NVIDIA's DRA driver is installed: pods that name the same claim share its GPU";
        group.good("DRA", found);
    }
    judge_offers(&mut group, facts);
    if facts.hami {
        let hint = format!(
            "containers load HAMi's library before Affinode's, so HAMi's limits apply. Containers with HAMi's virtual device memory are not offloaded. Affinode was tested with a similar library, not with HAMi itself ({EXAMPLES})"
        );
        group.warning("HAMi", "HAMi's library is installed", hint);
    }
    group.checks
}

/// Checks that only one program offers the GPUs of this node to Kubernetes.
fn judge_offers(group: &mut CheckGroup, facts: &SharingFacts) {
    let offers: Vec<&str> = [
        (facts.nvidia_plugin, "NVIDIA's device plugin"),
        (facts.dra, "NVIDIA's DRA driver"),
        (facts.affinode_plugin, "Affinode's device plugin"),
        (facts.affinode_dra, "Affinode's DRA driver"),
    ]
    .into_iter()
    .filter_map(|(runs, name)| runs.then_some(name))
    .collect();
    if !facts.affinode_plugin && !facts.affinode_dra {
        return;
    }
    if let [only] = offers[..] {
        group.good("offers", format!("only {only} offers the GPUs of this node"));
    } else {
        let hint = "Kubernetes assigns each GPU once per program, so pods may get more GPUs than the node has: keep one of these programs off this node, by its node selector";
        let found = format!("several programs offer the same GPUs: {}", offers.join(", "));
        group.warning("offers", found, hint);
    }
}

fn judge_resource(group: &mut CheckGroup, resource: &str, ids: &[String], shared_otherwise: bool) {
    if resource.starts_with(MIG) {
        let hint = "containers on MIG instances are not offloaded: turn MIG off with nvidia-smi -mig \
                    0, and share whole GPUs by time-slicing";
        group.warning("sharing", format!("{resource}: {} MIG instances", ids.len()), hint);
        return;
    }
    if ![GPU, "nvidia.com/gpu.shared", "affinode.io/gpu"].contains(&resource) {
        return;
    }
    // A shared GPU has several ids, which differ only in the suffix after "::".
    let gpus: BTreeSet<&str> = ids.iter().map(|id| id.split("::").next().unwrap_or(id)).collect();
    let found = format!("{resource}: {} for {} GPUs", ids.len(), gpus.len());
    if ids.len() > gpus.len() || shared_otherwise {
        group.good("sharing", found);
    } else {
        let hint = format!(
            "each GPU is assigned to one pod, so no other pod can use the VRAM that an offload frees: let the device plugin share each GPU ({EXAMPLES}/time-slicing.yaml), or use KAI, a DRA driver or Affinode's device plugin"
        );
        group.warning("sharing", found, hint);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::{super::CheckVerdict, *};

    fn facts(resource: &str, ids: &[&str]) -> SharingFacts {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        SharingFacts {
            devices: Some(Ok(BTreeMap::from([(resource.into(), ids)]))),
            ..SharingFacts::default()
        }
    }

    fn verdicts(facts: &SharingFacts) -> Vec<(&'static str, CheckVerdict)> {
        judge(facts).iter().map(|check| (check.name, check.verdict)).collect()
    }

    #[test]
    fn a_machine_without_kubernetes_has_no_check() {
        assert_eq!(verdicts(&SharingFacts::default()), []);
        assert_eq!(verdicts(&facts("example.com/fpga", &["a"])), []);
        // The device plugin of the resource was removed, so the record lists no device.
        assert_eq!(verdicts(&facts(GPU, &[])), []);
    }

    #[test]
    fn an_unshared_gpu_is_a_warning() {
        let once = facts(GPU, &["GPU-a", "GPU-b"]);
        assert_eq!(verdicts(&once), [("sharing", CheckVerdict::Warning)]);
        assert!(judge(&once)[0].hint.contains("time-slicing.yaml"));
        let twice = facts(GPU, &["GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"]);
        let checks = judge(&twice);
        assert_eq!(checks[0].verdict, CheckVerdict::Good);
        assert_eq!(checks[0].found, "nvidia.com/gpu: 4 for 2 GPUs");
        assert_eq!(
            verdicts(&facts("nvidia.com/gpu.shared", &["GPU-a::0", "GPU-a::1"])),
            [("sharing", CheckVerdict::Good)]
        );
    }

    #[test]
    fn mig_and_hami_are_warnings() {
        let mig = facts("nvidia.com/mig-1g.10gb", &["MIG-a", "MIG-b"]);
        assert_eq!(verdicts(&mig), [("sharing", CheckVerdict::Warning)]);
        let hami = SharingFacts { hami: true, ..facts(GPU, &["GPU-a-0", "GPU-a-1"]) };
        assert_eq!(
            verdicts(&hami),
            [("sharing", CheckVerdict::Good), ("HAMi", CheckVerdict::Warning)]
        );
    }

    #[test]
    fn a_gpu_shared_by_kai_passes() {
        let kai = SharingFacts { kai: 1, ..facts(GPU, &["GPU-a"]) };
        assert_eq!(verdicts(&kai), [("sharing", CheckVerdict::Good), ("KAI", CheckVerdict::Good)]);
        let dra = SharingFacts { dra: true, ..SharingFacts::default() };
        assert_eq!(verdicts(&dra), [("DRA", CheckVerdict::Good)]);
    }

    #[test]
    fn gpus_offered_by_two_programs_are_a_warning() {
        let seats = facts("affinode.io/gpu", &["GPU-a::0", "GPU-a::1"]);
        let alone = SharingFacts { affinode_plugin: true, ..seats.clone() };
        assert_eq!(
            verdicts(&alone),
            [("sharing", CheckVerdict::Good), ("offers", CheckVerdict::Good)]
        );
        let both = SharingFacts { nvidia_plugin: true, affinode_dra: true, ..facts(GPU, &["a"]) };
        let checks = judge(&both);
        assert_eq!(checks[1].verdict, CheckVerdict::Warning);
        assert!(checks[1].found.ends_with("NVIDIA's device plugin, Affinode's DRA driver"));
        // Without Affinode's own offers, NVIDIA's programs are not its concern.
        let nvidias = SharingFacts { nvidia_plugin: true, dra: true, ..SharingFacts::default() };
        assert_eq!(verdicts(&nvidias), [("DRA", CheckVerdict::Good)]);
    }

    #[test]
    fn what_is_on_a_node_is_found() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(SharingFacts::gather(root.path()), SharingFacts::default());
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            CHECKPOINT,
            r#"{"Data":{"PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-a::1"]},"AllocResp":"Cg=="}],"RegisteredDevices":{"nvidia.com/gpu":["GPU-a::0","GPU-a::1"]}},"Checksum":3251223}"#,
        );
        write(HAMI, "/usr/local/vgpu/libvgpu.so");
        write("var/lib/kubelet/device-plugins/nvidia-gpu.sock", "");
        let _plugin = UnixListener::bind(root.path().join(AFFINODE_PLUGIN)).unwrap();
        fs::create_dir_all(root.path().join(AFFINODE_DRA).parent().unwrap()).unwrap();
        // The driver has ended, and its socket is left.
        drop(UnixListener::bind(root.path().join(AFFINODE_DRA)).unwrap());
        for folder in [
            DRA,
            "var/log/pods/kai-resource-reservation_gpu-reservation-1_ab",
            "var/log/pods/ml_a_b",
        ] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let ids = vec!["GPU-a::0".to_owned(), "GPU-a::1".to_owned()];
        let expected = SharingFacts {
            devices: Some(Ok(BTreeMap::from([(GPU.to_owned(), ids)]))),
            kai: 1,
            nvidia_plugin: true,
            dra: true,
            affinode_plugin: true,
            affinode_dra: false,
            hami: true,
        };
        assert_eq!(SharingFacts::gather(root.path()), expected);
        write(CHECKPOINT, "half a fi");
        assert_eq!(
            verdicts(&SharingFacts::gather(root.path()))[0],
            ("sharing", CheckVerdict::Warning)
        );
    }
}
