//! Checks of how Kubernetes assigns the GPUs of this node: whether other pods can use the VRAM that
//! an offloaded container frees.
//!
//! [`find`] derives the findings from the facts. `affinode doctor` shows them as checks. The node
//! agent of a cluster shows them as a metric and as events of the node.

mod facts;

use std::collections::BTreeSet;

pub use facts::SharingFacts;

use super::{CheckGroup, DoctorCheck};

/// Resource name of whole GPUs in Kubernetes.
const GPU: &str = "nvidia.com/gpu";
/// Resource name of shared GPUs, if NVIDIA's device plugin renames them.
const SHARED_GPU: &str = "nvidia.com/gpu.shared";
/// Resource name of the seats of Affinode's device plugin.
const SEAT: &str = "affinode.io/gpu";
/// Prefix of the resource names of MIG instances in Kubernetes.
const MIG: &str = "nvidia.com/mig-";
/// Folder of this repository with examples of GPU sharing in Kubernetes.
const EXAMPLES: &str = "config/kubernetes/sharing";

/// A way in which the GPUs of a node are shared, or a problem of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharingKind {
    /// NVIDIA's device plugin offers each GPU several times, by time-slicing or MPS.
    TimeSlicing,
    /// Affinode's device plugin offers seats.
    Seats,
    /// KAI assigns fractions of GPUs.
    Kai,
    /// NVIDIA's DRA driver assigns GPUs to claims, which several pods can name.
    NvidiaDra,
    /// HAMi's library limits the VRAM of containers.
    Hami,
    /// The device plugin offers MIG instances.
    Mig,
    /// Each GPU is assigned to one pod.
    Unshared,
    /// Several programs offer the same GPUs to Kubernetes.
    OfferedTwice,
    /// The kubelet's record of devices cannot be read.
    Unknown,
}

impl SharingKind {
    /// All kinds, in their order in the metric.
    pub const ALL: [SharingKind; 9] = [
        SharingKind::TimeSlicing,
        SharingKind::Seats,
        SharingKind::Kai,
        SharingKind::NvidiaDra,
        SharingKind::Hami,
        SharingKind::Mig,
        SharingKind::Unshared,
        SharingKind::OfferedTwice,
        SharingKind::Unknown,
    ];

    /// Returns the word for this kind, which is a value of a metric label.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            SharingKind::TimeSlicing => "time-slicing",
            SharingKind::Seats => "seats",
            SharingKind::Kai => "kai",
            SharingKind::NvidiaDra => "nvidia-dra",
            SharingKind::Hami => "hami",
            SharingKind::Mig => "mig",
            SharingKind::Unshared => "unshared",
            SharingKind::OfferedTwice => "offered-twice",
            SharingKind::Unknown => "unknown",
        }
    }

    /// Returns the kind with this word.
    #[must_use]
    pub fn parse(word: &str) -> Option<SharingKind> {
        SharingKind::ALL.into_iter().find(|kind| kind.as_str() == word)
    }

    /// Returns the section of the documentation about this kind.
    #[must_use]
    pub const fn page(self) -> &'static str {
        match self {
            SharingKind::TimeSlicing => "docs/gpu-sharing.md#time-slicing",
            SharingKind::Seats => "docs/device-plugin.md#seats",
            SharingKind::Kai => "docs/gpu-sharing.md#kai-scheduler",
            SharingKind::NvidiaDra => "docs/gpu-sharing.md#nvidias-dra-driver",
            SharingKind::Hami => "docs/gpu-sharing.md#hami",
            SharingKind::Mig
            | SharingKind::Unshared
            | SharingKind::OfferedTwice
            | SharingKind::Unknown => "docs/gpu-sharing.md#by-node-pool",
        }
    }
}

/// A program that offers the GPUs of a node to Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuOffer {
    /// NVIDIA's device plugin, or a program with its sockets.
    NvidiaPlugin,
    /// NVIDIA's DRA driver, by ResourceSlices.
    NvidiaDra,
    /// Affinode's device plugin, as seats.
    AffinodePlugin,
    /// Affinode's DRA driver, by ResourceSlices.
    AffinodeDra,
}

impl GpuOffer {
    /// Returns the name of the program in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            GpuOffer::NvidiaPlugin => "NVIDIA's device plugin",
            GpuOffer::NvidiaDra => "NVIDIA's DRA driver",
            GpuOffer::AffinodePlugin => "Affinode's device plugin",
            GpuOffer::AffinodeDra => "Affinode's DRA driver",
        }
    }

    /// Returns the word for the program in the label of a node.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            GpuOffer::NvidiaPlugin => "nvidia-plugin",
            GpuOffer::NvidiaDra => "nvidia-dra",
            GpuOffer::AffinodePlugin => "affinode-plugin",
            GpuOffer::AffinodeDra => "affinode-dra",
        }
    }
}

/// A finding about the assignment of a node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingFinding {
    /// What was found. `None`: the finding only confirms that nothing is wrong.
    pub kind: Option<SharingKind>,
    /// Name of the check of `affinode doctor`.
    check: &'static str,
    /// Text of the finding.
    pub found: String,
    /// What to do about the finding. Empty: it is no problem.
    pub advice: String,
}

impl SharingFinding {
    fn new(kind: SharingKind, check: &'static str, found: impl Into<String>) -> SharingFinding {
        SharingFinding { kind: Some(kind), check, found: found.into(), advice: String::new() }
    }

    fn confirms(check: &'static str, found: impl Into<String>) -> SharingFinding {
        SharingFinding { kind: None, check, found: found.into(), advice: String::new() }
    }

    fn advising(self, advice: impl Into<String>) -> SharingFinding {
        SharingFinding { advice: advice.into(), ..self }
    }
}

/// Returns the checks of GPU sharing. On a machine without Kubernetes, the list is empty.
#[must_use]
pub fn judge(facts: &SharingFacts) -> Vec<DoctorCheck> {
    let mut group = CheckGroup::new("Kubernetes");
    for finding in find(facts) {
        match finding.advice.is_empty() {
            true => group.good(finding.check, finding.found),
            false => group.warning(finding.check, finding.found, finding.advice),
        }
    }
    group.checks
}

/// Returns the programs that offer the GPUs of this node to Kubernetes.
#[must_use]
pub fn offers(facts: &SharingFacts) -> Vec<GpuOffer> {
    [
        (facts.nvidia_plugin, GpuOffer::NvidiaPlugin),
        (facts.dra, GpuOffer::NvidiaDra),
        (facts.affinode_plugin, GpuOffer::AffinodePlugin),
        (facts.affinode_dra, GpuOffer::AffinodeDra),
    ]
    .into_iter()
    .filter_map(|(runs, offer)| runs.then_some(offer))
    .collect()
}

/// Returns the findings about the assignment of the node's GPUs. On a machine without Kubernetes,
/// the list is empty.
#[must_use]
pub fn find(facts: &SharingFacts) -> Vec<SharingFinding> {
    let mut findings = Vec::new();
    match &facts.devices {
        Some(Ok(devices)) => {
            let offered = devices.iter().filter(|(_, ids)| !ids.is_empty());
            findings.extend(offered.filter_map(|(resource, ids)| {
                of_resource(resource, ids, facts, devices.contains_key(SEAT))
            }));
        }
        Some(Err(why)) => {
            let unknown = SharingFinding::new(SharingKind::Unknown, "sharing", why.clone());
            findings.push(unknown.advising("restart the kubelet, which writes this file again: without the file it is unknown how GPUs are shared"));
        }
        None => {}
    }
    if facts.kai > 0 {
        let s = if facts.kai == 1 { "" } else { "s" };
        let found = format!("KAI assigns fractions of {} GPU{s}", facts.kai);
        findings.push(SharingFinding::new(SharingKind::Kai, "KAI", found));
    }
    if facts.dra {
        let found = "NVIDIA's DRA driver runs: pods that name the same claim share its GPU";
        findings.push(SharingFinding::new(SharingKind::NvidiaDra, "DRA", found));
    }
    findings.extend(of_offers(facts));
    if facts.hami {
        let advice = format!(
            "containers load HAMi's library before Affinode's, so HAMi's limits apply. Containers with HAMi's virtual device memory are not offloaded. Affinode was tested with a similar library, not with HAMi itself ({EXAMPLES})"
        );
        let hami = SharingFinding::new(SharingKind::Hami, "HAMi", "HAMi's library is installed");
        findings.push(hami.advising(advice));
    }
    findings
}

/// Checks that only one program offers the GPUs of this node to Kubernetes.
fn of_offers(facts: &SharingFacts) -> Option<SharingFinding> {
    if !facts.affinode_plugin && !facts.affinode_dra {
        return None;
    }
    let offers = offers(facts);
    if let [only] = offers[..] {
        let found = format!("only {} offers the GPUs of this node", only.name());
        return Some(SharingFinding::confirms("offers", found));
    }
    let names: Vec<&str> = offers.into_iter().map(GpuOffer::name).collect();
    let found = format!("several programs offer the same GPUs: {}", names.join(", "));
    let twice = SharingFinding::new(SharingKind::OfferedTwice, "offers", found);
    Some(twice.advising("Kubernetes assigns each GPU once per program, so pods may get more GPUs than the node has: keep one of these programs off this node, by its node selector, or leave the GPUs to the other program with the label affinode.io/offer-gpus=false of the node"))
}

/// Returns the finding about a resource. `has_seats`: the node also has the resource of Affinode's
/// seats. Without it, Affinode's plugin offers its seats as NVIDIA's resource, which is an option.
fn of_resource(
    resource: &str,
    ids: &[String],
    facts: &SharingFacts,
    has_seats: bool,
) -> Option<SharingFinding> {
    if resource.starts_with(MIG) {
        let advice = "containers on MIG instances are not offloaded: turn MIG off with nvidia-smi -mig \
                      0, and share whole GPUs by time-slicing";
        let found = format!("{resource}: {} MIG instances", ids.len());
        return Some(SharingFinding::new(SharingKind::Mig, "sharing", found).advising(advice));
    }
    // A shared GPU has several ids, which differ only in the suffix after "::".
    let gpus: BTreeSet<&str> = ids.iter().map(|id| id.split("::").next().unwrap_or(id)).collect();
    let found = format!("{resource}: {} for {} GPUs", ids.len(), gpus.len());
    let is_shared = ids.len() > gpus.len();
    let shared_otherwise = facts.kai > 0 || facts.hami || facts.affinode_dra;
    let is_own = facts.affinode_plugin && !facts.nvidia_plugin && !has_seats;
    match resource {
        // A GPU with a single seat lacks host memory for more seats, or is full.
        SEAT => Some(SharingFinding::new(SharingKind::Seats, "sharing", found)),
        GPU if is_own => Some(SharingFinding::new(SharingKind::Seats, "sharing", found)),
        GPU | SHARED_GPU if is_shared => {
            let found = format!("{found}, by time-slicing or MPS");
            Some(SharingFinding::new(SharingKind::TimeSlicing, "sharing", found))
        }
        GPU | SHARED_GPU if shared_otherwise => Some(SharingFinding::confirms("sharing", found)),
        GPU | SHARED_GPU => {
            let unshared = SharingFinding::new(SharingKind::Unshared, "sharing", found);
            Some(unshared.advising(format!(
                "each GPU is assigned to one pod, so no other pod can use the VRAM that an offload frees: let the device plugin share each GPU ({EXAMPLES}/time-slicing.yaml), or use KAI, a DRA driver or Affinode's device plugin"
            )))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
        assert_eq!(checks[0].found, "nvidia.com/gpu: 4 for 2 GPUs, by time-slicing or MPS");
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
    fn each_kind_has_a_word_of_its_own() {
        let words: BTreeSet<&str> = SharingKind::ALL.into_iter().map(SharingKind::as_str).collect();
        assert_eq!(words.len(), SharingKind::ALL.len());
        for kind in SharingKind::ALL {
            assert_eq!(SharingKind::parse(kind.as_str()), Some(kind));
        }
        assert_eq!(SharingKind::parse("slices"), None);
    }

    #[test]
    fn findings_have_the_kinds_of_their_facts() {
        let kinds = |facts: &SharingFacts| -> Vec<_> {
            find(facts).into_iter().filter_map(|finding| finding.kind).collect()
        };
        let twice = facts(GPU, &["GPU-a::0", "GPU-a::1"]);
        assert_eq!(kinds(&twice), [SharingKind::TimeSlicing]);
        assert_eq!(kinds(&facts(GPU, &["GPU-a"])), [SharingKind::Unshared]);
        let own = SharingFacts { affinode_plugin: true, ..twice };
        assert_eq!(kinds(&own), [SharingKind::Seats], "devicePlugin.resourceName");
        let seats = facts(SEAT, &["GPU-a::0"]);
        assert_eq!(kinds(&SharingFacts { affinode_plugin: true, ..seats }), [SharingKind::Seats]);
        let all = SharingFacts {
            devices: Some(Err("no".into())),
            kai: 2,
            nvidia_plugin: true,
            dra: true,
            affinode_dra: true,
            hami: true,
            ..SharingFacts::default()
        };
        use SharingKind::{Hami, Kai, NvidiaDra, OfferedTwice, Unknown};
        assert_eq!(kinds(&all), [Unknown, Kai, NvidiaDra, OfferedTwice, Hami]);
        assert_eq!(
            offers(&all),
            [GpuOffer::NvidiaPlugin, GpuOffer::NvidiaDra, GpuOffer::AffinodeDra]
        );
    }
}
