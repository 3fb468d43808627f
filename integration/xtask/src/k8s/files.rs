//! Writes the files that the components of a cluster read, and builds the components' arguments.
//! The files are credentials, kubeconfigs, and the configuration of kubelet and CNI.

use std::{fs, io, net::Ipv4Addr, os::unix::fs::symlink, path::Path};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use serde_json::{Value, json};

use super::node::Node;

/// Identities of the control plane's components: file name of the kubeconfig, user, groups.
const USERS: [(&str, &str, &str); 3] = [
    (ADMIN, "admin", "system:masters"),
    ("controller-manager.json", "system:kube-controller-manager", ""),
    ("scheduler.json", "system:kube-scheduler", ""),
];
pub const ADMIN: &str = "admin.json";

pub const ETCD: &str = "--data-dir=DIR/etcd --listen-client-urls=http://127.0.0.1:2379 \
     --advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380 \
     --unsafe-no-fsync";
pub const API_SERVER: &str = "--etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=443 \
     --advertise-address=10.97.0.1 --service-cluster-ip-range=10.96.0.0/24 --cert-dir=DIR/certs \
     --token-auth-file=DIR/tokens.csv --authorization-mode=Node,RBAC \
     --enable-admission-plugins=NodeRestriction --allow-privileged=true \
     --service-account-issuer=https://kubernetes.default.svc \
     --service-account-signing-key-file=DIR/sa.key --service-account-key-file=DIR/sa.pub \
     --kubelet-preferred-address-types=InternalIP --enable-aggregator-routing=true --profiling=false \
     --requestheader-client-ca-file=DIR/front-proxy-ca.crt --requestheader-allowed-names=front-proxy \
     --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
     --requestheader-extra-headers-prefix=X-Remote-Extra- \
     --proxy-client-cert-file=DIR/front-proxy.crt --proxy-client-key-file=DIR/front-proxy.key";
pub const CONTROLLER_MANAGER: &str = "--kubeconfig=DIR/controller-manager.json --leader-elect=false --use-service-account-credentials=true \
     --service-account-private-key-file=DIR/sa.key --root-ca-file=DIR/certs/apiserver.crt \
     --bind-address=127.0.0.1";
pub const SCHEDULER: &str =
    "--kubeconfig=DIR/scheduler.json --leader-elect=false --bind-address=127.0.0.1";

/// Returns the file name of the kubeconfig of a node's kubelet.
pub fn of_kubelet(node: &str) -> String {
    format!("kubelet-of-{node}.json")
}

/// Writes the keys, tokens and kubeconfigs of all components.
pub fn write(dir: &Path, nodes: &[Node<'_>]) -> Result<()> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    fs::write(dir.join("sa.key"), key.serialize_pem())?;
    fs::write(dir.join("sa.pub"), key.public_key_pem())?;
    front_proxy(dir)?;
    let mut tokens = String::new();
    let kubelet = |node: &Node<'_>| {
        (of_kubelet(&node.name), format!("system:node:{}", node.name), "system:nodes")
    };
    let others = USERS.map(|(file, user, groups)| (file.to_owned(), user.to_owned(), groups));
    for (file, user, groups) in others.into_iter().chain(nodes.iter().map(kubelet)) {
        let token = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let token: String =
            token.public_key_raw().iter().take(32).map(|byte| format!("{byte:02x}")).collect();
        tokens.push_str(&format!("{token},{user},{user},{groups}\n"));
        // The API server creates its certificate at its start.
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": "https://10.96.0.1:443",
                "certificate-authority": dir.join("certs/apiserver.crt"),
            }}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        });
        fs::write(dir.join(file), config.to_string())?;
    }
    Ok(fs::write(dir.join("tokens.csv"), tokens)?)
}

/// Writes the certificate with which the API server forwards requests to other API servers of the
/// cluster, such as the server of external metrics, and the authority of this certificate.
fn front_proxy(dir: &Path) -> Result<()> {
    let named = |name: &str| -> Result<CertificateParams> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, name);
        Ok(params)
    };
    let mut authority = named("front-proxy-ca")?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    fs::write(dir.join("front-proxy-ca.crt"), authority.self_signed(&authority_key)?.pem())?;
    let mut client = named("front-proxy")?;
    client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let issuer = Issuer::new(authority, authority_key);
    fs::write(dir.join("front-proxy.crt"), client.signed_by(&key, &issuer)?.pem())?;
    Ok(fs::write(dir.join("front-proxy.key"), key.serialize_pem())?)
}

/// Writes a certificate for the loopback address, its key, and its authority, into a folder. Programs
/// that are both servers and clients of each other can use it. The names of the files are those in a
/// Secret of type `kubernetes.io/tls`.
pub fn loopback_certificate(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir)?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority_key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    fs::write(dir.join("ca.crt"), authority.self_signed(&authority_key)?.pem())?;
    let mut both = CertificateParams::new(vec![Ipv4Addr::LOCALHOST.to_string()])?;
    both.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let issuer = Issuer::new(authority, authority_key);
    fs::write(dir.join("tls.crt"), both.signed_by(&key, &issuer)?.pem())?;
    Ok(fs::write(dir.join("tls.key"), key.serialize_pem())?)
}

/// Writes the CNI configuration of a network in which each pod has its own pair of interfaces.
pub fn cni(dir: &Path, plugins: &Path, subnet: &str) -> Result<()> {
    fs::create_dir_all(dir.join("net.d"))?;
    symlink(plugins, dir.join("bin"))?;
    let network = json!({
        "cniVersion": "1.0.0", "name": "pods",
        "plugins": [{"type": "ptp", "ipam": {
            "type": "host-local", "dataDir": dir.join("leases"),
            "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}],
        }}],
    });
    Ok(fs::write(dir.join("net.d/10-pods.conflist"), network.to_string())?)
}

/// Returns the configuration of a node's kubelet. It prevents the kubelet from changing the
/// machine's limits and firewall.
pub fn kubelet(node: &Node<'_>) -> Value {
    let world = node.world;
    let no_eviction = json!({
        "memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
        "imagefs.available": "0%", "imagefs.inodesFree": "0%",
    });
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "address": node.address(), "healthzBindAddress": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": format!("unix://{}", world.containerd().socket().display()),
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{}", world.cgroup_parent()),
        "failCgroupV1": false, "failSwapOn": false, "makeIPTablesUtilChains": false,
        "oomScoreAdj": 0, "evictionHard": no_eviction, "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": false, "enableControllerAttachDetach": false,
        "nodeStatusUpdateFrequency": "2s", "syncFrequency": "10s",
    })
}

/// Creates the cgroups in which the kubelet creates the pods' cgroups.
pub fn cgroups(parent: &str) -> Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    let hierarchies = match root.join("cgroup.controllers").exists() {
        true => vec![root.to_owned()],
        false => fs::read_dir(root)?
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_dir())
            .collect(),
    };
    for hierarchy in hierarchies {
        match fs::create_dir(hierarchy.join(parent)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error)
                    .with_context(|| format!("cannot create a cgroup in {}", hierarchy.display()));
            }
            _ => {}
        }
    }
    Ok(())
}
