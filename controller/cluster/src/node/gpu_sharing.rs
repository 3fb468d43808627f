//! Shows in the cluster how the node's GPUs are shared: a label and an annotation of the node, a
//! metric, and an event for each change. The findings are those of `affinode doctor`.

use std::{collections::BTreeSet, path::PathBuf};

use affinode_installer::doctor::sharing::{
    self, GpuOffer, SharingFacts, SharingFinding, SharingKind,
};
use k8s_openapi::api::core::v1::Node;
use kube::{ResourceExt, core::PartialObjectMeta};

use super::{
    node_events::NodeEvents,
    node_labels::{GPU_SHARING, GPUS_OFFERED_BY, NodeLabels},
};

/// Value of the label of a node if several programs offer its GPUs.
const SEVERAL: &str = "several";

/// How the GPUs of a node are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SharingReading {
    findings: Vec<SharingFinding>,
    offers: Vec<GpuOffer>,
}

impl SharingReading {
    fn of(facts: &SharingFacts) -> SharingReading {
        SharingReading { findings: sharing::find(facts), offers: sharing::offers(facts) }
    }

    fn kinds(&self) -> BTreeSet<SharingKind> {
        self.findings.iter().filter_map(|finding| finding.kind).collect()
    }

    /// Returns the program that offers the GPUs, as the value of a label.
    fn offered_by(&self) -> Option<&'static str> {
        match self.offers[..] {
            [] => None,
            [only] => Some(only.as_str()),
            _ => Some(SEVERAL),
        }
    }

    /// Returns whether two readings have the same kinds of findings and the same programs. Counts
    /// of devices may differ.
    fn resembles(&self, other: &SharingReading) -> bool {
        self.kinds() == other.kinds() && self.offers == other.offers
    }
}

/// Reads how the GPUs of the node are shared. A change counts when two readings in a row show it,
/// because a kubelet that starts removes the sockets of all plugins for some seconds.
pub struct GpuSharing {
    host_root: PathBuf,
    last: Option<SharingReading>,
    settled: Option<SharingReading>,
}

impl GpuSharing {
    /// Creates the reader. `host_root`: the node's root, as this process sees it.
    #[must_use]
    pub fn new(host_root: PathBuf) -> GpuSharing {
        GpuSharing { host_root, last: None, settled: None }
    }

    /// Reads the files and sockets of the node. `may_offer`: whether Affinode's device plugin and DRA
    /// driver may offer the GPUs of the node.
    pub async fn read(&mut self, may_offer: bool) {
        let root = self.host_root.clone();
        let gathered = tokio::task::spawn_blocking(move || SharingFacts::gather(&root)).await;
        match gathered {
            Ok(mut facts) => {
                // Their sockets stay, for the pods that have GPUs.
                facts.affinode_plugin &= may_offer;
                facts.affinode_dra &= may_offer;
                self.add(SharingReading::of(&facts));
            }
            Err(error) => tracing::warn!("GPU sharing: cannot read the node's files: {error}"),
        }
    }

    fn add(&mut self, reading: SharingReading) {
        if self.last.as_ref().is_some_and(|last| last.resembles(&reading)) {
            self.settled = Some(reading.clone());
        }
        self.last = Some(reading);
    }

    /// Returns the kinds of all findings.
    #[must_use]
    pub fn kinds(&self) -> BTreeSet<SharingKind> {
        self.settled.as_ref().map(SharingReading::kinds).unwrap_or_default()
    }

    /// Returns the finding that several programs offer the same GPUs.
    #[must_use]
    pub fn offered_twice(&self) -> Option<&SharingFinding> {
        let mut findings = self.settled.iter().flat_map(|reading| &reading.findings);
        findings.find(|finding| finding.kind == Some(SharingKind::OfferedTwice))
    }

    /// Writes the findings into the label and the annotation of the node object, and publishes an
    /// event for each finding that the annotation did not have.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error.
    pub async fn publish(
        &self,
        node: &PartialObjectMeta<Node>,
        labels: &NodeLabels,
        events: &NodeEvents,
    ) -> kube::Result<()> {
        let Some(reading) = &self.settled else { return Ok(()) };
        let kinds = text_of(&reading.kinds());
        let (annotation, label) =
            (node.annotations().get(GPU_SHARING), node.labels().get(GPUS_OFFERED_BY));
        if annotation.map(String::as_str) == kinds.as_deref()
            && label.map(String::as_str) == reading.offered_by()
        {
            return Ok(());
        }
        labels.gpu_sharing(reading.offered_by(), kinds.as_deref()).await?;
        let known = annotation.map(|text| kinds_of(text)).unwrap_or_default();
        for finding in &reading.findings {
            if let Some(kind) = finding.kind.filter(|kind| !known.contains(kind)) {
                events.gpu_sharing(kind, finding).await;
            }
        }
        Ok(())
    }
}

/// Removes the label and the annotation from the node object.
///
/// # Errors
/// If the API server does not reply, or returns an error.
pub async fn clear(node: &PartialObjectMeta<Node>, labels: &NodeLabels) -> kube::Result<()> {
    let is_set =
        node.annotations().contains_key(GPU_SHARING) || node.labels().contains_key(GPUS_OFFERED_BY);
    if is_set { labels.gpu_sharing(None, None).await } else { Ok(()) }
}

/// Returns the value of the annotation for these kinds. `None`: there are none.
fn text_of(kinds: &BTreeSet<SharingKind>) -> Option<String> {
    let words: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
    (!words.is_empty()).then(|| words.join(","))
}

/// Returns the kinds in a value of the annotation. Other words are ignored.
fn kinds_of(text: &str) -> BTreeSet<SharingKind> {
    text.split(',').filter_map(SharingKind::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing() -> GpuSharing {
        GpuSharing::new(PathBuf::from("/nowhere"))
    }

    fn reading(kai: usize, offers_twice: bool) -> SharingReading {
        let facts = SharingFacts {
            kai,
            affinode_plugin: offers_twice,
            nvidia_plugin: true,
            ..SharingFacts::default()
        };
        SharingReading::of(&facts)
    }

    #[test]
    fn change_counts_after_two_readings() {
        let mut sharing = sharing();
        sharing.add(reading(1, false));
        assert!(sharing.kinds().is_empty());
        sharing.add(reading(2, false));
        assert_eq!(text_of(&sharing.kinds()).unwrap(), "kai", "another number of GPUs");
        sharing.add(reading(0, true));
        assert_eq!(text_of(&sharing.kinds()).unwrap(), "kai");
        assert_eq!(sharing.offered_twice(), None);
        sharing.add(reading(0, true));
        assert_eq!(text_of(&sharing.kinds()).unwrap(), "offered-twice");
        assert!(sharing.offered_twice().unwrap().found.contains("NVIDIA's device plugin, Aff"));
    }

    #[test]
    fn label_names_the_program() {
        assert_eq!(SharingReading::default().offered_by(), None);
        assert_eq!(reading(0, false).offered_by(), Some("nvidia-plugin"));
        assert_eq!(reading(0, true).offered_by(), Some("several"));
    }

    #[test]
    fn annotation_holds_the_kinds() {
        assert_eq!(text_of(&BTreeSet::new()), None);
        let all = BTreeSet::from(SharingKind::ALL);
        assert_eq!(kinds_of(&text_of(&all).unwrap()), all);
        assert_eq!(kinds_of("kai,,what, hami"), BTreeSet::from([SharingKind::Kai]));
    }
}
