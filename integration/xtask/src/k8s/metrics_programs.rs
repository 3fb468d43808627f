//! Provides the programs of a cluster's external metrics: Prometheus of the machine's distribution,
//! and prometheus-adapter and KEDA, which are built from the source of Go's module proxy.

use std::path::PathBuf;

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result};

use super::go_module::{GoModule, GoProgram};
use crate::{apt, output};

/// Each module has builds of its own, because its versions of Kubernetes' modules differ from those
/// of the cluster.
const ADAPTER: GoModule =
    GoModule { folder: "metrics", path: "sigs.k8s.io/prometheus-adapter", version: "v0.12.0" };
const KEDA: GoModule =
    GoModule { folder: "keda", path: "github.com/kedacore/keda/v2", version: "v2.21.0" };
/// Folder of KEDA's module that contains the definitions of its resource types.
const KEDA_TYPES: &str = "config/crd/bases";

/// Paths of the programs and files.
pub struct MetricsPrograms {
    pub prometheus: PathBuf,
    pub adapter: PathBuf,
    /// KEDA's operator, which makes HorizontalPodAutoscalers and computes metrics.
    pub keda_operator: PathBuf,
    /// KEDA's server of external metrics, which asks the operator for them.
    pub keda_adapter: PathBuf,
    /// Folder of the definitions of KEDA's resource types.
    pub keda_types: PathBuf,
}

impl MetricsPrograms {
    /// Builds and fetches the programs and files that are missing.
    pub fn prepare(artifacts: &Artifacts) -> Result<Self> {
        let cache = artifacts.cache_dir();
        let unpacked = cache.join("prometheus");
        let prometheus = unpacked.join("usr/bin/prometheus");
        if !prometheus.is_file() {
            output::step("Fetching Prometheus");
            apt::unpack_own("prometheus", &unpacked).context("cannot fetch prometheus")?;
        }
        Ok(Self {
            prometheus,
            adapter: ADAPTER.build(&cache, &go("adapter", "some minutes"))?,
            keda_operator: KEDA.build(&cache, &go("operator", "ten minutes on two cores"))?,
            keda_adapter: KEDA.build(&cache, &go("adapter", "some minutes"))?,
            keda_types: KEDA.copied(&cache, KEDA_TYPES, "types")?,
        })
    }
}

/// A program in Go alone, without C.
const fn go(name: &'static str, time: &'static str) -> GoProgram {
    GoProgram { name, time, has_c: false }
}
