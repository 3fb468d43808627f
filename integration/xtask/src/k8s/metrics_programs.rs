//! Provides the programs of a cluster's external metrics: Prometheus of the machine's distribution,
//! and prometheus-adapter, which is built from the source of Go's module proxy. The resource types
//! of KEDA come from the same proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{apt, output, sh};

/// Module and version of prometheus-adapter. It has a build of its own, because it needs older
/// versions of Kubernetes' modules than the cluster.
const ADAPTER: (&str, &str) = ("sigs.k8s.io/prometheus-adapter", "v0.12.0");
/// Module and version of KEDA. Only its resource types are used.
const KEDA: (&str, &str) = ("github.com/kedacore/keda/v2", "v2.21.0");
/// File of KEDA's module that defines the type ScaledObject.
const SCALED_OBJECT: &str = "config/crd/bases/keda.sh_scaledobjects.yaml";

/// Paths of the programs and files.
pub struct MetricsPrograms {
    pub prometheus: PathBuf,
    pub adapter: PathBuf,
    /// Definition of KEDA's resource type ScaledObject.
    pub scaled_object: PathBuf,
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
        let folder = cache.join("metrics");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let adapter = folder.join(format!("adapter-{}", ADAPTER.1));
        if !adapter.is_file() {
            build_adapter(&folder, &adapter)?;
        }
        let scaled_object = folder.join(format!("scaledobjects-{}.yaml", KEDA.1));
        if !scaled_object.is_file() {
            output::step(&format!("Fetching the resource types of KEDA {}", KEDA.1));
            let source = download(&folder, KEDA)?.join(SCALED_OBJECT);
            let text =
                fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
            fs::write(&scaled_object, text)?;
        }
        Ok(Self { prometheus, adapter, scaled_object })
    }
}

/// Builds prometheus-adapter into the file `program`.
fn build_adapter(folder: &Path, program: &Path) -> Result<()> {
    if sh::find("go").is_none() {
        bail!("go is missing: install Go 1.26 or later to build prometheus-adapter");
    }
    let (module, version) = ADAPTER;
    output::step(&format!("Building prometheus-adapter {version} (once; some minutes)"));
    let text = format!("module affinode.io/metrics\n\ngo 1.26.0\n\nrequire {module} {version}\n");
    fs::write(folder.join("go.mod"), text)?;
    let mut go = Command::new("nice");
    go.args(["go", "build", "-trimpath", "-ldflags", "-s -w", "-o"]).arg(program);
    go.arg(format!("{module}/cmd/adapter")).current_dir(folder);
    go.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod -buildvcs=false -p=2");
    sh::run(&mut go)
}

/// Fetches the source of a module, and returns the folder in which Go stores it.
fn download(folder: &Path, (module, version): (&str, &str)) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Module {
        #[serde(rename = "Dir")]
        dir: PathBuf,
    }
    let mut download = Command::new("go");
    download.args(["mod", "download", "-json", &format!("{module}@{version}")]);
    download.current_dir(folder).env("GO111MODULE", "on").env("GOFLAGS", "-modcacherw -mod=mod");
    let told = sh::read(&mut download)?;
    let found: Module =
        serde_json::from_str(&told).context("cannot parse what go printed about the module")?;
    Ok(found.dir)
}
