//! Provides the programs of a cluster's external metrics: Prometheus of the machine's distribution,
//! and prometheus-adapter and KEDA, which are built from the source of Go's module proxy.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{apt, output, sh};

/// A Go module with its version, and the name of a folder for its builds. Each module has builds of
/// its own, because its versions of Kubernetes' modules differ from those of the cluster.
struct Module {
    folder: &'static str,
    path: &'static str,
    version: &'static str,
}

const ADAPTER: Module =
    Module { folder: "metrics", path: "sigs.k8s.io/prometheus-adapter", version: "v0.12.0" };
const KEDA: Module =
    Module { folder: "keda", path: "github.com/kedacore/keda/v2", version: "v2.21.0" };
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
            adapter: ADAPTER.build(&cache, "adapter", "some minutes")?,
            keda_operator: KEDA.build(&cache, "operator", "ten minutes on two cores")?,
            keda_adapter: KEDA.build(&cache, "adapter", "some minutes")?,
            keda_types: KEDA.copied(&cache, KEDA_TYPES, "types")?,
        })
    }
}

impl Module {
    /// Builds the program `cmd/name` of the module, unless it is built already. Returns its path.
    fn build(&self, cache: &Path, name: &str, time: &str) -> Result<PathBuf> {
        let folder = cache.join(self.folder);
        let program = folder.join(format!("{name}-{}", self.version));
        if program.is_file() {
            return Ok(program);
        }
        if sh::find("go").is_none() {
            bail!("go is missing: install Go 1.26 or later to build {}", self.path);
        }
        self.require(&folder)?;
        output::step(&format!("Building {name} of {} {} (once; {time})", self.path, self.version));
        let mut go = Command::new("nice");
        go.args(["go", "build", "-trimpath", "-ldflags", "-s -w", "-o"]).arg(&program);
        go.arg(format!("{}/cmd/{name}", self.path)).current_dir(&folder);
        go.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod -buildvcs=false -p=2");
        sh::run(&mut go)?;
        Ok(program)
    }

    /// Copies a folder of the module's source, unless it is copied already. Returns the path of the
    /// copy.
    fn copied(&self, cache: &Path, source: &str, name: &str) -> Result<PathBuf> {
        let folder = cache.join(self.folder);
        let copy = folder.join(format!("{name}-{}", self.version));
        if copy.is_dir() {
            return Ok(copy);
        }
        self.require(&folder)?;
        let source = self.download(&folder)?.join(source);
        let half = folder.join(format!("{name}.new"));
        sh::read(Command::new("rm").arg("-rf").arg(&half))?;
        sh::read(Command::new("cp").args(["-r", "--no-preserve=mode"]).arg(&source).arg(&half))?;
        fs::rename(&half, &copy)?;
        Ok(copy)
    }

    /// Writes a go.mod that requires the module.
    fn require(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let Module { folder: name, path, version } = self;
        let text = format!("module affinode.io/{name}\n\ngo 1.26.0\n\nrequire {path} {version}\n");
        Ok(fs::write(folder.join("go.mod"), text)?)
    }

    /// Fetches the source of the module, and returns the folder in which Go stores it.
    fn download(&self, folder: &Path) -> Result<PathBuf> {
        #[derive(Deserialize)]
        struct Found {
            #[serde(rename = "Dir")]
            dir: PathBuf,
        }
        let mut download = Command::new("go");
        download.args(["mod", "download", "-json", &format!("{}@{}", self.path, self.version)]);
        download.current_dir(folder).env("GO111MODULE", "on");
        download.env("GOFLAGS", "-modcacherw -mod=mod");
        let told = sh::read(&mut download)?;
        let found: Found =
            serde_json::from_str(&told).context("cannot parse what go printed about the module")?;
        Ok(found.dir)
    }
}
