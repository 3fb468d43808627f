//! Provides the programs of a cluster. Kubernetes and helm are built from the source of Go's module
//! proxy. etcd and the CNI plugins come from the machine's distribution. All programs are stored in
//! `target/affinode/cache/k8s`.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use affinode_e2e::artifacts::Artifacts;
use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{
    apt,
    helm::{MODULE as HELM, VERSION as HELM_VERSION},
    output, sh,
};

const KUBERNETES: &str = "k8s.io/kubernetes";
/// Version of Kubernetes that is built.
pub const VERSION: &str = "1.36.3";
/// Version of the Go modules that are part of Kubernetes' repository and are also released
/// separately. Its minor and patch numbers are those of [`VERSION`].
const STAGING_VERSION: &str = "v0.36.3";
/// The components that are built from Kubernetes' source.
const COMPONENTS: [&str; 5] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"];
const DEVICE_PLUGIN: &str = include_str!("device_plugin.go");
/// Name of the test's own device plugin.
pub const DEVICE_PLUGIN_NAME: &str = "device-plugin";
/// Packages of the distribution that are unpacked. Each is listed with a file that exists if the
/// package is unpacked already.
const PACKAGES: [(&str, &str); 2] =
    [("etcd-server", "usr/bin/etcd"), ("containernetworking-plugins", "usr/lib/cni/ptp")];

/// Paths of the cluster's programs.
pub struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Builds and fetches the programs that are missing.
    pub fn prepare(artifacts: &Artifacts) -> Result<Self> {
        let folder = artifacts.cache_dir().join("k8s");
        let programs = Self { folder };
        for (package, sign) in PACKAGES {
            if !programs.folder.join(sign).is_file() {
                output::step(&format!("Fetching {package}"));
                apt::unpack_own(package, &programs.folder)
                    .with_context(|| format!("cannot fetch {package}"))?;
            }
        }
        programs.build()?;
        Ok(programs)
    }

    /// Returns the path of a program that was built from source.
    pub fn built(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Returns the folder of the programs that were built from source.
    pub fn bin_dir(&self) -> PathBuf {
        self.folder.join("bin")
    }

    pub fn etcd(&self) -> PathBuf {
        self.folder.join(PACKAGES[0].1)
    }

    /// Returns the folder of the CNI plugins.
    pub fn cni_dir(&self) -> PathBuf {
        self.folder.join("usr/lib/cni")
    }

    /// Builds all programs in one Go module, which requires the chosen release of each program.
    /// With one module, a package that several programs use is built only once.
    fn build(&self) -> Result<()> {
        let bin = self.folder.join("bin");
        let wanted = self.folder.join("build/wanted");
        let plugin = self.folder.join("build").join(DEVICE_PLUGIN_NAME);
        let packages: Vec<String> = COMPONENTS
            .iter()
            .map(|name| format!("{KUBERNETES}/cmd/{name}"))
            .chain([format!("{HELM}/cmd/helm"), format!("./{DEVICE_PLUGIN_NAME}")])
            .collect();
        // Built programs are reused until one of their sources changes.
        let sign = format!("{HELM_VERSION} {}\n{DEVICE_PLUGIN}", ldflags());
        if fs::read_to_string(&wanted).is_ok_and(|known| known == sign) {
            return Ok(());
        }
        if sh::find("go").is_none() {
            bail!("go is missing: install Go 1.26 or later to build Kubernetes");
        }
        output::step(&format!(
            "Building Kubernetes {VERSION} and helm (once; half an hour on two cores)"
        ));
        for folder in [&bin, &plugin] {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        fs::write(plugin.join("main.go"), DEVICE_PLUGIN)?;
        let folder = self.folder.join("build");
        fs::write(folder.join("go.mod"), module(&source(&folder)?)?)?;
        let mut go = Command::new("nice");
        go.args(["go", "build", "-trimpath", "-ldflags"]).arg(ldflags()).arg("-o").arg(&bin);
        go.args(packages).current_dir(&folder);
        go.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod -buildvcs=false -p=2");
        sh::run(&mut go)?;
        Ok(fs::write(wanted, sign)?)
    }
}

/// Returns the linker flags that set versions. Kubernetes reports its version to helm, and its
/// components compare their versions.
fn ldflags() -> String {
    let minor = VERSION.split('.').nth(1).unwrap_or_default();
    let mut flags = "-s -w".to_owned();
    for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
        for (name, value) in
            [("Version", format!("v{VERSION}")), ("Major", "1".into()), ("Minor", minor.into())]
        {
            let _ = write!(flags, " -X {package}.git{name}={value}");
        }
    }
    // Without a cluster, helm compares a chart's version with its own.
    for package in ["chartutil", "lint/rules"] {
        for (name, value) in [("Major", "1"), ("Minor", minor)] {
            let _ = write!(flags, " -X {HELM}/pkg/{package}.k8sVersion{name}={value}");
        }
    }
    flags
}

/// Fetches the source of Kubernetes, and returns the folder in which Go stores it.
fn source(folder: &Path) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Module {
        #[serde(rename = "Dir")]
        dir: PathBuf,
    }
    let mut download = Command::new("go");
    download.args(["mod", "download", "-json", &format!("{KUBERNETES}@v{VERSION}")]);
    // A module file of an earlier run would be used instead.
    download.current_dir(folder).env("GO111MODULE", "on").env("GOFLAGS", "-modcacherw");
    let told = sh::read(&mut download)?;
    let found: Module =
        serde_json::from_str(&told).context("cannot parse what go printed about the module")?;
    Ok(found.dir)
}

/// Returns the text of a go.mod that requires all programs. It replaces the modules that are part
/// of Kubernetes' repository by their separate releases.
fn module(source: &Path) -> Result<String> {
    let file = source.join("go.mod");
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut module = format!(
        "module affinode.io/test\n\ngo 1.26.0\n\nrequire (\n\t{KUBERNETES} v{VERSION}\n\t{HELM} {HELM_VERSION}\n)\n\nreplace (\n"
    );
    let staging = text
        .lines()
        .filter_map(|line| line.trim().split_once(" => ./staging/").map(|(name, _)| name));
    for name in staging {
        let _ = writeln!(module, "\t{name} => {name} {STAGING_VERSION}");
    }
    module.push_str(")\n");
    Ok(module)
}
