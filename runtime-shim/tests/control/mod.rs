//! A fake controller for tests that only records the calls that it receives.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use affinode_proto::api::control::{
    ActionResponse, AnnounceRequest, AnnounceResponse, Announcement, EventsRequest, EventsResponse,
    ListRequest, ListResponse, OffloadRequest, ReloadRequest, ReloadResponse, RestoreRequest,
    WithdrawRequest, WithdrawResponse,
};
use affinode_proto::api::control_ttrpc::{Control, create_control};
use ttrpc::asynchronous::{Server, TtrpcContext};

#[derive(Clone, Default)]
pub struct Told(Arc<Mutex<Vec<(String, Announcement)>>>);

pub struct Controller {
    /// Sender that ends the service when it is dropped.
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
    told: Told,
    run_dir: PathBuf,
    /// The lock that a real controller would hold. The fake controller keeps the lock even while it
    /// does not serve, so that no real controller starts before the restart.
    _lock: File,
}

impl Controller {
    /// Starts to serve `<run dir>/control.sock`.
    pub fn start(run_dir: &Path) -> Controller {
        std::fs::create_dir_all(run_dir).unwrap();
        let lock = File::create(run_dir.join("controller.lock")).unwrap();
        lock.lock().unwrap();
        let mut controller = Controller {
            stop: None,
            thread: None,
            told: Told::default(),
            run_dir: run_dir.to_owned(),
            _lock: lock,
        };
        controller.serve();
        controller
    }

    /// Ends the fake controller, and starts it again with an empty record of calls.
    pub fn restart(&mut self) {
        self.end();
        self.serve();
    }

    fn serve(&mut self) {
        let socket = self.run_dir.join("control.sock");
        let _ = std::fs::remove_file(&socket);
        let told = Told::default();
        self.told = told.clone();
        let service = create_control(Arc::new(told));
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut server = Server::new()
                    .bind(&format!("unix://{}", socket.display()))
                    .unwrap()
                    .register_service(service);
                server.start().await.unwrap();
                ready.send(()).unwrap();
                let _ = stopped.await;
                // Ends the connections too, as the kernel does when a controller's process ends.
                let _ = server.shutdown().await;
            });
        });
        is_ready.recv().unwrap();
        self.stop = Some(stop);
        self.thread = Some(thread);
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// Returns the recorded call of this kind, `announce` or `withdraw`, for this id or key.
    pub fn told(&self, kind: &str, name: &str) -> Option<Announcement> {
        let told = self.told.0.lock().unwrap();
        told.iter()
            .find(|(what, about)| what == kind && (about.id == name || about.key == name))
            .map(|(_, about)| about.clone())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.end();
    }
}

type Answer<T> = ttrpc::Result<T>;

#[async_trait::async_trait]
impl Control for Told {
    async fn announce(
        &self,
        _: &TtrpcContext,
        request: AnnounceRequest,
    ) -> Answer<AnnounceResponse> {
        let about = request.container.unwrap_or_default();
        self.0.lock().unwrap().push(("announce".to_owned(), about));
        let mut response = AnnounceResponse::new();
        response.warnings.push("a word of warning".to_owned());
        Ok(response)
    }

    async fn withdraw(
        &self,
        _: &TtrpcContext,
        request: WithdrawRequest,
    ) -> Answer<WithdrawResponse> {
        let mut about = Announcement::new();
        about.key = request.key;
        self.0.lock().unwrap().push(("withdraw".to_owned(), about));
        Ok(WithdrawResponse::new())
    }

    async fn list(&self, _: &TtrpcContext, _: ListRequest) -> Answer<ListResponse> {
        Ok(ListResponse::new())
    }

    async fn offload(&self, _: &TtrpcContext, _: OffloadRequest) -> Answer<ActionResponse> {
        Ok(ActionResponse::new())
    }

    async fn restore(&self, _: &TtrpcContext, _: RestoreRequest) -> Answer<ActionResponse> {
        Ok(ActionResponse::new())
    }

    async fn events(&self, _: &TtrpcContext, _: EventsRequest) -> Answer<EventsResponse> {
        Ok(EventsResponse::new())
    }

    async fn reload(&self, _: &TtrpcContext, _: ReloadRequest) -> Answer<ReloadResponse> {
        Ok(ReloadResponse::new())
    }
}
