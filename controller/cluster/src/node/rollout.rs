//! Limits the number of nodes on which Affinode is installed at the same time, because an
//! installation restarts containerd.
//!
//! The chart creates one Lease per slot. A node takes a free slot before its first installation and
//! releases the slot afterwards. If the installation fails, the node keeps its slot while it tries
//! again. A roll-out therefore stops when the number of failing nodes reaches the number of slots.

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::{SignedDuration, Timestamp},
};
use kube::{Api, Client, api::PostParams};

/// Time after which a slot counts as free if its node has not renewed the slot, because the node is
/// probably gone. The time is longer than a failed installation plus the pause after it. It is also
/// longer than the difference between the clocks of two nodes.
const SLOT: SignedDuration = SignedDuration::from_mins(15);

/// The slots of a roll-out, as one node uses them. A slot permits one node to install Affinode.
pub struct RolloutSlots {
    api: Api<Lease>,
    names: Vec<String>,
    node: String,
}

impl RolloutSlots {
    /// Creates the slots of a roll-out, one for each of the Leases with these names. Without names,
    /// any number of nodes may install Affinode at the same time.
    #[must_use]
    pub fn new(client: Client, namespace: &str, names: &[String], node: &str) -> RolloutSlots {
        let api = Api::namespaced(client, namespace);
        RolloutSlots { api, names: names.to_vec(), node: node.to_owned() }
    }

    /// Takes a free slot, or renews the slot that this node has. Returns whether the node has a
    /// slot.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error other than a conflict.
    pub async fn take(&self) -> kube::Result<bool> {
        if self.names.is_empty() {
            return Ok(true);
        }
        let mut slots = Vec::new();
        for name in &self.names {
            slots.push(self.api.get(name).await?);
        }
        // The node's own slot comes first, so that the node never has two slots.
        slots.sort_by_key(|slot| holder(slot) != Some(&self.node));
        for slot in slots {
            if holder(&slot) != Some(&self.node) && is_taken(&slot, Timestamp::now()) {
                continue;
            }
            if self.write(slot, Some(&self.node)).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Releases this node's slot, even if an earlier agent of the node took the slot.
    ///
    /// # Errors
    /// If the API server does not reply, or returns an error. The slot is then free after it
    /// expires.
    pub async fn release(&self) -> kube::Result<()> {
        for name in &self.names {
            let slot = self.api.get(name).await?;
            if holder(&slot) == Some(&self.node) {
                self.write(slot, None).await?;
            }
        }
        Ok(())
    }

    /// Writes a slot with the name of the node that holds the slot. A `holder` of `None` releases
    /// the slot. Returns false if another client has changed the slot since it was read.
    async fn write(&self, mut slot: Lease, holder: Option<&str>) -> kube::Result<bool> {
        let name = slot.metadata.name.clone().unwrap_or_default();
        let now = holder.map(|_| MicroTime(Timestamp::now()));
        slot.spec = Some(LeaseSpec {
            holder_identity: holder.map(str::to_owned),
            lease_duration_seconds: holder
                .map(|_| i32::try_from(SLOT.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: now.clone(),
            renew_time: now,
            ..LeaseSpec::default()
        });
        match self.api.replace(&name, &PostParams::default(), &slot).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(error)) if error.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn holder(slot: &Lease) -> Option<&String> {
    slot.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}

fn is_taken(slot: &Lease, now: Timestamp) -> bool {
    let renewed = slot.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
    holder(slot).is_some() && renewed.is_some_and(|renewed| now.duration_since(renewed.0) < SLOT)
}

#[cfg(test)]
mod tests;
