//! Tests both services of the DRA driver. The tests call the services over their sockets, as a
//! kubelet does.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Mutex, PoisonError},
};

use affinode_controller::inventory::gpu_facts::NodeGpus;
use futures_util::FutureExt;
use kube::Client;
use serde_json::{Value, json};
use tonic::{
    client,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};

use super::*;
use crate::node::dra::{
    cdi_lookup::CdiLookup,
    claim_files::ClaimFiles,
    messages::{ClaimReference, PreparedDevice},
    policy::{API_VERSION, KIND},
    sockets::NodeSocket,
};

const DEVICE: &str = "gpu-a";

/// Claims of a simulated API server, by name. A request for any other claim fails. A request for
/// the claim [`SLOW`] gets no reply.
#[derive(Clone, Default)]
struct Claims(Arc<Mutex<BTreeMap<String, Value>>>);

const SLOW: &str = "slow";

impl Claims {
    fn add(&self, name: &str, policy: &Value) {
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"namespace": "ml", "name": name, "uid": format!("u-{name}")},
            "spec": {},
            "status": {"allocation": {"devices": {
                "results": [{
                    "request": "gpu", "driver": DRIVER, "pool": "one", "device": DEVICE,
                    "shareID": format!("share-{name}"),
                }],
                "config": [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": {
                    "apiVersion": API_VERSION, "kind": KIND, "policy": policy,
                }}}],
            }}},
        });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), claim);
    }

    /// Replaces the GPU that is allocated to a claim, as a new allocation of this claim would.
    fn allocate(&self, name: &str, device: &str) {
        let mut claims = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let claim = claims.get_mut(name).unwrap();
        claim["status"]["allocation"]["devices"]["results"][0]["device"] = device.into();
    }

    fn fail(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn client(&self) -> Client {
        let claims = self.clone();
        let answer = move |request: hyper::Request<kube::client::Body>| {
            let name = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            let found = claims.0.lock().unwrap_or_else(PoisonError::into_inner).get(&name).cloned();
            let body = found.unwrap_or_else(
                || json!({"kind": "Status", "status": "Failure", "message": "down", "code": 503}),
            );
            let code = if body["kind"] == "Status" { 503 } else { 200 };
            let body = kube::client::Body::from(body.to_string().into_bytes());
            let answer = hyper::Response::builder().status(code).body(body);
            async move {
                if name == SLOW {
                    std::future::pending::<()>().await;
                }
                answer
            }
        };
        Client::new(tower::service_fn(answer), "default")
    }
}

/// A DRA driver under test, with its sockets and files in a folder.
struct Plugin {
    folder: tempfile::TempDir,
    claims: Claims,
    state: watch::Receiver<Registration>,
    health: watch::Sender<HealthRecord>,
    servers: Vec<tokio::task::JoinHandle<()>>,
    _sockets: Vec<NodeSocket>,
}

impl Plugin {
    fn start() -> Plugin {
        let folder = tempfile::tempdir().unwrap();
        let cdi = folder.path().join("cdi");
        fs::create_dir(&cdi).unwrap();
        let gpu = r#"{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-A"}]}"#;
        fs::write(cdi.join("nvidia.json"), gpu).unwrap();
        let (_, state) = watch::channel(Registration::default());
        let mut plugin = Plugin {
            folder,
            claims: Claims::default(),
            state,
            health: watch::Sender::default(),
            servers: Vec::new(),
            _sockets: Vec::new(),
        };
        plugin.restart();
        plugin
    }

    /// Replaces the driver with a new driver that knows only what the files contain.
    fn restart(&mut self) {
        self.servers.drain(..).for_each(|server| server.abort());
        let path = |name: &str| self.folder.path().join(name);
        let files = ClaimFiles {
            cdi_dir: path("cdi"),
            policy_dir: path("claims"),
            policy_dir_on_node: "/run/affinode/claims".into(),
        };
        let lookup = CdiLookup { folders: vec![path("cdi")], kind: "nvidia.com/gpu".into() };
        let (_, gpus) = watch::channel(NodeGpus::default());
        let preparer = ClaimPreparer::new(self.claims.client(), "one", files, lookup, gpus, true);
        let health = HealthSource { pool: "one".into(), record: self.health.subscribe() };
        let plugin = PluginService { preparer, health };
        let (sender, state) = watch::channel(Registration::default());
        let registration =
            RegistrationService { endpoint: path("dra.sock").display().to_string(), state: sender };
        let (first, first_socket) = NodeSocket::bind(&path("reg.sock")).unwrap();
        let (second, second_socket) = NodeSocket::bind(&path("dra.sock")).unwrap();
        self.servers = vec![
            tokio::spawn(async {
                serve(first, move |request| registration.clone().answer(request)).await.unwrap();
            }),
            tokio::spawn(async {
                serve(second, move |request| plugin.clone().answer(request)).await.unwrap();
            }),
        ];
        (self.state, self._sockets) = (state, vec![first_socket, second_socket]);
    }

    async fn call<Q, A>(&self, socket: &Path, method: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut client = connect(socket).await;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(method);
        Ok(client.unary(Request::new(request), path, codec).await?.into_inner())
    }

    async fn prepare(&self, names: &[&str]) -> PrepareResponse {
        let request = ClaimsRequest { claims: names.iter().map(|name| reference(name)).collect() };
        self.call(&self.folder.path().join("dra.sock"), PREPARE, request).await.unwrap()
    }

    async fn unprepare(&self, names: &[&str]) -> UnprepareResponse {
        let request = ClaimsRequest { claims: names.iter().map(|name| reference(name)).collect() };
        self.call(&self.folder.path().join("dra.sock"), UNPREPARE, request).await.unwrap()
    }

    /// Returns the names of the files that record for which claims the kubelet has asked.
    fn requested(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path().join("claims/requested"));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
    }

    fn files(&self) -> Vec<String> {
        let folders = ["cdi", "claims"].map(|name| self.folder.path().join(name));
        let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
        let files = entries.flatten().filter(|entry| entry.path().is_file());
        let mut names: Vec<String> =
            files.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

async fn connect(socket: &Path) -> client::Grpc<Channel> {
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    let mut client = client::Grpc::new(endpoint.connect().await.unwrap());
    client.ready().await.unwrap();
    client
}

fn reference(name: &str) -> ClaimReference {
    ClaimReference { namespace: "ml".into(), uid: format!("u-{name}"), name: name.into() }
}

#[tokio::test]
async fn kubelet_finds_the_endpoint() {
    let plugin = Plugin::start();
    let socket = plugin.folder.path().join("reg.sock");
    let info: PluginInfo = plugin.call(&socket, GET_INFO, InfoRequest {}).await.unwrap();
    let endpoint = plugin.folder.path().join("dra.sock").display().to_string();
    let expected = PluginInfo {
        r#type: "DRAPlugin".into(),
        name: "gpu.affinode.io".into(),
        endpoint,
        supported_versions: vec!["v1.DRAPlugin".into()],
    };
    assert_eq!(info, expected);
    for (status, state) in [
        (
            RegistrationStatus { plugin_registered: false, error: "version".into() },
            Registration::Refused("version".into()),
        ),
        (
            RegistrationStatus { plugin_registered: true, error: String::new() },
            Registration::Registered,
        ),
    ] {
        let _: RegistrationStatusResponse = plugin.call(&socket, NOTIFY, status).await.unwrap();
        assert_eq!(*plugin.state.borrow(), state);
    }
}

#[tokio::test]
async fn prepared_claim_has_files_and_ids() {
    let plugin = Plugin::start();
    plugin.claims.add("one", &json!({"priority": 5}));
    let answer = plugin.prepare(&["one"]).await;
    let device = PreparedDevice {
        request_names: vec!["gpu".into()],
        pool_name: "one".into(),
        device_name: DEVICE.into(),
        cdi_device_ids: vec!["nvidia.com/gpu=GPU-A".into(), "gpu.affinode.io/claim=u-one-0".into()],
        share_id: Some("share-one".into()),
    };
    let claim = &answer.claims["u-one"];
    assert_eq!((claim.error.as_str(), &claim.devices), ("", &vec![device]));
    assert_eq!(plugin.files(), ["gpu.affinode.io-claim_u-one.json", "nvidia.json", "u-one-0"]);
    let policy = fs::read_to_string(plugin.folder.path().join("claims/u-one-0")).unwrap();
    assert_eq!(policy, r#"{"affinode.io/claim":"ml/one","affinode.io/priority":"5"}"#);
}

#[tokio::test]
async fn second_preparation_gives_the_same() {
    let mut plugin = Plugin::start();
    plugin.claims.add("one", &json!({}));
    plugin.claims.add("two", &json!({}));
    let first = plugin.prepare(&["one"]).await;
    assert_eq!(plugin.prepare(&["one"]).await, first);
    plugin.restart();
    assert_eq!(plugin.prepare(&["one"]).await, first, "the answer of a new driver is the same");
    plugin.claims.fail();
    assert_eq!(plugin.prepare(&["one"]).await, first, "the API server is not needed");
    let second = plugin.prepare(&["two"]).await;
    assert!(second.claims["u-two"].error.contains("down"), "{second:?}");
}

/// The preparation of a claim has failed. The record of the claim must stay until the kubelet
/// reverts the preparation. The record prevents the removal of the driver, which the kubelet needs
/// to end the pod.
#[tokio::test]
async fn failed_claim_is_held_until_its_end() {
    let plugin = Plugin::start();
    plugin.claims.add("bad", &json!({"offload": "sometimes"}));
    plugin.prepare(&["bad"]).await;
    assert_eq!(
        (plugin.files(), plugin.requested()),
        (vec!["nvidia.json".into()], vec!["u-bad".into()])
    );
    plugin.unprepare(&["bad"]).await;
    assert!(plugin.requested().is_empty());
}

#[tokio::test]
async fn other_claims_do_not_wait_for_the_api() {
    let plugin = Plugin::start();
    plugin.claims.add("one", &json!({}));
    let slow = plugin.prepare(&[SLOW]);
    let others = async {
        let prepared = plugin.prepare(&["one"]).await;
        assert_eq!(prepared.claims["u-one"].error, "");
        assert_eq!(plugin.unprepare(&["one", SLOW]).await.claims.len(), 2);
    };
    tokio::select! {
        () = others => {}
        answer = slow => panic!("the slow claim was answered before the other claims: {answer:?}"),
    }
    assert!(plugin.requested().is_empty() && plugin.files() == ["nvidia.json"]);
}

#[tokio::test]
async fn new_allocation_gets_no_devices_of_the_old() {
    let plugin = Plugin::start();
    plugin.claims.add("one", &json!({}));
    let first = plugin.prepare(&["one"]).await;
    let specification = plugin.folder.path().join("cdi/nvidia.json");
    fs::remove_file(&specification).unwrap();
    assert_eq!(plugin.prepare(&["one"]).await, first, "the same allocation");
    plugin.claims.allocate("one", "gpu-b");
    let error = &plugin.prepare(&["one"]).await.claims["u-one"].error;
    assert!(error.contains("nvidia-ctk cdi generate"), "{error}");
}

#[tokio::test]
async fn unknown_claims_are_unprepared() {
    let mut plugin = Plugin::start();
    plugin.claims.add("one", &json!({"offload": "eager"}));
    plugin.prepare(&["one"]).await;
    plugin.claims.fail();
    plugin.restart();
    for _ in 0..2 {
        let answer = plugin.unprepare(&["one", "never"]).await;
        assert_eq!(answer.claims.len(), 2, "one result for each claim");
        assert!(answer.claims.values().all(|claim| claim.error.is_empty()), "{answer:?}");
        assert_eq!(plugin.files(), ["nvidia.json"]);
    }
}

#[tokio::test]
async fn one_bad_claim_does_not_stop_the_others() {
    let plugin = Plugin::start();
    plugin.claims.add("good", &json!({}));
    plugin.claims.add("bad", &json!({"offload": "sometimes"}));
    let answer = plugin.prepare(&["bad", "good", "../escape"]).await;
    assert_eq!(answer.claims["u-good"].error, "");
    let error = &answer.claims["u-bad"].error;
    assert!(error.contains("claim ml/bad") && error.contains("accepted: auto, eager"), "{error}");
    assert!(answer.claims["u-../escape"].error.contains("not the UID"), "{answer:?}");
    let written = ["gpu.affinode.io-claim_u-good.json", "nvidia.json", "u-good-0"];
    assert_eq!(plugin.files(), written);
    fs::remove_file(plugin.folder.path().join("cdi/nvidia.json")).unwrap();
    plugin.claims.add("late", &json!({}));
    let error = &plugin.prepare(&["late"]).await.claims["u-late"].error;
    assert!(error.contains("nvidia-ctk cdi generate"), "{error}");
}

#[tokio::test]
async fn unknown_methods_are_refused() {
    const OTHER: &str = "/k8s.io.kubelet.pkg.apis.dra.v2.DRAPlugin/NodePrepareResources";
    let plugin = Plugin::start();
    for socket in ["reg.sock", "dra.sock"] {
        let socket = plugin.folder.path().join(socket);
        let answer: Result<InfoRequest, Status> = plugin.call(&socket, OTHER, InfoRequest {}).await;
        assert_eq!(answer.unwrap_err().code(), tonic::Code::Unimplemented);
    }
}

#[tokio::test]
async fn health_is_reported_after_each_reading() {
    let plugin = Plugin::start();
    let socket = plugin.folder.path().join("dra.sock");
    let mut client = connect(&socket).await;
    let codec = ProstCodec::<HealthRequest, HealthReport>::default();
    let path = PathAndQuery::from_static(WATCH_HEALTH);
    let answer = client.server_streaming(Request::new(HealthRequest {}), path, codec).await;
    let mut reports = answer.unwrap().into_inner();
    let first = reports.message().await.unwrap().unwrap();
    assert_eq!(first, HealthReport::default(), "no GPU has been read yet");
    assert!(reports.message().now_or_never().is_none(), "no report without a reading");
    let read = std::collections::BTreeSet::from(["gpu-1".to_owned()]);
    plugin.health.send_modify(|record| record.record(&read, "", 7));
    let report = reports.message().await.unwrap().unwrap();
    assert_eq!(report, plugin.health.borrow().report("one"));
    assert_eq!(report.devices.len(), 1);
}

/// Encodes a header field with an indexed name, as Go's client does, but without Huffman coding.
fn field(name_index: u8, value: &str) -> Vec<u8> {
    let length = u8::try_from(value.len()).unwrap();
    [&[0x40 | name_index, length], value.as_bytes()].concat()
}

fn frame(kind: u8, flags: u8, stream_id: u8, payload: &[u8]) -> Vec<u8> {
    let size = u8::try_from(payload.len()).unwrap();
    [&[0, 0, size, kind, flags, 0, 0, 0, stream_id], payload].concat()
}

/// A request whose authority is the path of the registration socket is accepted, because the
/// kubelet sends such requests.
#[tokio::test]
async fn socket_path_as_authority_is_accepted() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let plugin = Plugin::start();
    let headers = [
        // :method POST, :scheme http.
        vec![0x83, 0x86],
        field(4, GET_INFO),
        field(1, "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpu.affinode.io-reg.sock"),
        field(31, "application/grpc"),
    ];
    let sent = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 0x4, 1, &headers.concat()),
        // An empty message, and the end of the stream.
        frame(0, 0x1, 1, &[0; 5]),
    ];
    let socket = plugin.folder.path().join("reg.sock");
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.write_all(&sent.concat()).await.unwrap();
    let mut reply = Vec::new();
    let found = async {
        while !reply.windows(9).any(|part| part == b"DRAPlugin") {
            assert_ne!(stream.read_buf(&mut reply).await.unwrap(), 0, "closed: {reply:?}");
        }
    };
    tokio::time::timeout(Duration::from_secs(30), found).await.unwrap();
}
