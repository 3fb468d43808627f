//! The kubelet's side of the protocol between kubelet and DRA driver: gRPC over the sockets that the
//! agent serves in the kubelet's folder.

use std::{
    collections::HashMap,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use affinode_cluster::node::dra::messages::{
    ClaimReference, ClaimsRequest, InfoRequest, PluginInfo, PrepareResponse, PreparedClaim,
    RegistrationStatus, RegistrationStatusResponse, UnprepareResponse, UnpreparedClaim,
};
use prost::Message;
use tokio::{runtime::Handle, sync::oneshot, task::JoinHandle};
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{Agent, ENDPOINT, REGISTRATION};

const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";

/// A simulated kubelet of the node of one agent.
pub struct Kubelet {
    /// Runs the calls. A thread of its own drives them, so that a call goes on while the test waits
    /// for something else.
    runtime: Handle,
    folder: PathBuf,
    links: tempfile::TempDir,
    /// Ends the thread of the runtime when it is dropped.
    _end: oneshot::Sender<()>,
}

impl Kubelet {
    /// Returns a kubelet for the node of an agent.
    pub fn of(agent: &Agent) -> Kubelet {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        std::thread::spawn(move || runtime.block_on(ended));
        Kubelet {
            runtime: handle,
            folder: agent.folder.clone(),
            links: tempfile::tempdir().unwrap(),
            _end: end,
        }
    }

    /// Returns a kubelet that has registered the driver of an agent.
    pub fn with_driver(agent: &Agent) -> Kubelet {
        let kubelet = Kubelet::of(agent);
        kubelet.notify(true, "");
        kubelet
    }

    /// Reads the properties of the driver at the registration socket.
    pub fn info(&self) -> PluginInfo {
        let channel = self.connect(REGISTRATION);
        self.runtime.block_on(call(channel, GET_INFO, InfoRequest {})).unwrap()
    }

    /// Tells the driver whether the kubelet uses it, and if not, why.
    pub fn notify(&self, registered: bool, error: &str) {
        let status = RegistrationStatus { plugin_registered: registered, error: error.into() };
        let channel = self.connect(REGISTRATION);
        let answer = self.runtime.block_on(call(channel, NOTIFY, status));
        let _: RegistrationStatusResponse = answer.unwrap();
    }

    /// Prepares claims in one call on a connection of its own.
    pub fn prepare(&self, claims: &[ClaimReference]) -> HashMap<String, PreparedClaim> {
        let channel = self.connect(ENDPOINT);
        let answer = self.runtime.block_on(prepare(channel, claims.to_vec()));
        answer.unwrap().claims
    }

    /// Reverts the preparation of claims in one call on a connection of its own.
    pub fn unprepare(&self, claims: &[ClaimReference]) -> HashMap<String, UnpreparedClaim> {
        let request = ClaimsRequest { claims: claims.to_vec() };
        let channel = self.connect(ENDPOINT);
        let answer: UnprepareResponse =
            self.runtime.block_on(call(channel, UNPREPARE, request)).unwrap();
        answer.claims
    }

    /// Prepares each claim in a call of its own. All calls run at the same time on one connection.
    pub fn prepare_at_once(&self, claims: &[ClaimReference]) -> HashMap<String, PreparedClaim> {
        let channel = self.connect(ENDPOINT);
        let calls = claims.iter().map(|claim| prepare(channel.clone(), vec![claim.clone()]));
        let calls: Vec<_> = calls.map(|call| self.runtime.spawn(call)).collect();
        let mut prepared = HashMap::new();
        for call in calls {
            prepared.extend(self.runtime.block_on(call).unwrap().unwrap().claims);
        }
        prepared
    }

    /// Starts a preparation. The returned task has its result. Aborting the task cancels the call.
    pub fn start_preparing(
        &self,
        claims: &[ClaimReference],
    ) -> JoinHandle<Result<PrepareResponse, Status>> {
        let channel = self.connect(ENDPOINT);
        self.runtime.spawn(prepare(channel, claims.to_vec()))
    }

    /// Waits for the result of a preparation.
    pub fn result(
        &self,
        call: JoinHandle<Result<PrepareResponse, Status>>,
    ) -> Result<PrepareResponse, Status> {
        self.runtime.block_on(call).unwrap()
    }

    fn connect(&self, socket: &str) -> Channel {
        let link = self.links.path().join(Path::new(socket).file_name().unwrap());
        if link.symlink_metadata().is_err() {
            // The path of the socket is too long for an address.
            symlink(self.folder.join(socket), &link).unwrap();
        }
        let endpoint = Endpoint::from_shared(format!("unix://{}", link.display())).unwrap();
        self.runtime.block_on(endpoint.connect()).unwrap()
    }
}

async fn prepare(channel: Channel, claims: Vec<ClaimReference>) -> Result<PrepareResponse, Status> {
    call(channel, PREPARE, ClaimsRequest { claims }).await
}

async fn call<Q, A>(channel: Channel, method: &'static str, request: Q) -> Result<A, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let mut client = Grpc::new(channel);
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Q, A>::default();
    let path = PathAndQuery::from_static(method);
    Ok(client.unary(Request::new(request), path, codec).await?.into_inner())
}
