//! A simulated API server in memory for one node agent. It stores objects by path and supports
//! merge patches. It rejects writes that are based on an old version, and reports each change of
//! the node in a watch.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

/// Time limit for an action that a test expects of the agent. The agent checks its node every 15 s,
/// and after a failure every 2 min.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Path of the node object.
pub const NODE: &str = "/api/v1/nodes/one";
/// Path of all ResourceClaims in the namespace of the tests.
pub const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims";
/// Path of all ResourceSlices.
pub const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

#[derive(Clone)]
pub struct ApiServer {
    pub address: SocketAddr,
    state: Arc<(Mutex<Objects>, Condvar)>,
}

#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    /// All labels that the node has had, oldest first.
    labels: Vec<Value>,
    created: Vec<Value>,
    version: u64,
    watchers: Vec<TcpStream>,
    slice_watchers: Vec<TcpStream>,
    /// Paths for which a client that reads them gets no answer.
    held: BTreeSet<String>,
    /// Paths of `held` that a client has asked for.
    asked: BTreeSet<String>,
}

impl ApiServer {
    pub fn start(labels: Value) -> ApiServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = ApiServer { address, state: Arc::default() };
        server.put(NODE, json!({ "metadata": { "name": "one", "uid": "u", "labels": labels } }));
        let serving = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = serving.clone();
                thread::spawn(move || server.answer(stream));
            }
        });
        server
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.state.0.lock().unwrap()
    }

    pub fn put(&self, path: &str, object: Value) {
        self.lock().put(path, object);
        self.state.1.notify_all();
    }

    pub fn get(&self, path: &str) -> Value {
        self.lock().by_path.get(path).cloned().unwrap_or(Value::Null)
    }

    /// Changes an object, as `kubectl label` or the agent would.
    pub fn patch(&self, path: &str, change: &Value) -> Value {
        let mut objects = self.lock();
        let mut object = objects.by_path.get(path).cloned().unwrap_or(json!({}));
        merge(&mut object, change);
        let object = objects.put(path, object);
        drop(objects);
        self.state.1.notify_all();
        object
    }

    /// Waits until `is_so` returns true, and fails the test after a time limit.
    pub fn until(&self, what: &str, is_so: impl Fn(&ApiServer) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if is_so(self) {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what} does not happen: {}", self.get(NODE));
            // If the change comes between the check and this wait, it is seen a second later.
            let wait = left.min(Duration::from_secs(1));
            drop(self.state.1.wait_timeout(self.lock(), wait).unwrap());
        }
    }

    pub fn label(&self, name: &str) -> Value {
        self.get(NODE)["metadata"]["labels"][name].clone()
    }

    /// Returns whether the node has been without a label at any time.
    pub fn lacked(&self, name: &str) -> bool {
        self.lock().labels.iter().any(|labels| labels[name].is_null())
    }

    pub fn annotation(&self, name: &str) -> String {
        let value = self.get(NODE)["metadata"]["annotations"][name].clone();
        value.as_str().unwrap_or_default().to_owned()
    }

    /// Returns the objects that clients have created, such as events.
    pub fn created(&self) -> Vec<Value> {
        self.lock().created.clone()
    }

    /// Returns all ResourceSlices of the server.
    pub fn slices(&self) -> Vec<Value> {
        let objects = self.lock();
        let slices = objects.by_path.iter().filter(|(path, _)| path.starts_with(SLICES));
        slices.map(|(_, slice)| slice.clone()).collect()
    }

    /// Removes an object, as a kubelet or the agent would.
    pub fn remove(&self, path: &str) {
        let mut objects = self.lock();
        if let Some(object) = objects.by_path.remove(path) {
            objects.tell_slice_watchers("DELETED", &object);
        }
        drop(objects);
        self.state.1.notify_all();
    }

    /// Delays the answers to all readings of an object until [`ApiServer::release`].
    pub fn hold(&self, path: &str) {
        self.lock().held.insert(path.to_owned());
    }

    /// Returns whether a client waits for the answer to a reading of a held object.
    pub fn is_asked_for(&self, path: &str) -> bool {
        self.lock().asked.contains(path)
    }

    /// Sends the delayed answers of an object, and delays no further answers.
    pub fn release(&self, path: &str) {
        let mut objects = self.lock();
        objects.held.remove(path);
        objects.asked.remove(path);
        drop(objects);
        self.state.1.notify_all();
    }

    /// Waits while the object of this path is held.
    fn wait_while_held(&self, path: &str) {
        let mut objects = self.lock();
        while objects.held.contains(path) {
            if objects.asked.insert(path.to_owned()) {
                self.state.1.notify_all();
            }
            objects = self.state.1.wait(objects).unwrap();
        }
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut line, mut length) = (String::new(), 0);
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        loop {
            let mut field = String::new();
            reader.read_line(&mut field).unwrap();
            let field = field.trim().to_lowercase();
            if field.is_empty() {
                break;
            }
            if let Some(number) = field.strip_prefix("content-length:") {
                length = number.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        let mut words = line.split(' ');
        let (method, uri) = (words.next().unwrap(), words.next().unwrap());
        let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
        if query.contains("watch=true") {
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            let mut objects = self.lock();
            match path {
                SLICES => objects.slice_watchers.push(stream),
                _ => objects.watchers.push(stream),
            }
            return;
        }
        self.wait_while_held(path);
        let (status, answer) = self.reply(method, path, body);
        let text = answer.to_string();
        let head = format!(
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            text.len()
        );
        // An error is ignored: an agent that has ended does not read the reply.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(text.as_bytes()));
    }

    fn reply(&self, method: &str, path: &str, sent: Value) -> (u16, Value) {
        let failure = |code: u16, reason: &str| {
            (
                code,
                json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": reason }),
            )
        };
        match method {
            "GET" if path == "/api/v1/nodes" => {
                let items = [self.get(NODE)];
                let version = self.lock().version.to_string();
                (
                    200,
                    json!({
                        "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                        "metadata": { "resourceVersion": version }, "items": items,
                    }),
                )
            }
            "GET" if path == SLICES => {
                let version = self.lock().version.to_string();
                let list = json!({
                    "kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1",
                    "metadata": { "resourceVersion": version }, "items": self.slices(),
                });
                (200, list)
            }
            "POST" if path == SLICES => {
                let mut slice = sent;
                let name = format!("slice-{}", self.lock().version);
                slice["metadata"]["name"] = name.as_str().into();
                self.put(&format!("{SLICES}/{name}"), slice);
                (201, self.get(&format!("{SLICES}/{name}")))
            }
            "DELETE" => {
                self.remove(path);
                (200, json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }))
            }
            "GET" => match self.get(path) {
                Value::Null => failure(404, "NotFound"),
                object => (200, object),
            },
            "PATCH" => (200, self.patch(path, &sent)),
            "PUT" => {
                let held = self.get(path)["metadata"]["resourceVersion"].clone();
                if held != sent["metadata"]["resourceVersion"] {
                    return failure(409, "Conflict");
                }
                self.put(path, sent);
                (200, self.get(path))
            }
            "POST" => {
                self.lock().created.push(sent.clone());
                self.state.1.notify_all();
                (201, sent)
            }
            _ => failure(405, "MethodNotAllowed"),
        }
    }
}

impl Objects {
    fn put(&mut self, path: &str, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        if path == NODE {
            self.labels.push(object["metadata"]["labels"].clone());
            object["kind"] = "PartialObjectMetadata".into();
            object["apiVersion"] = "meta.k8s.io/v1".into();
            let event = format!("{}\n", json!({ "type": "MODIFIED", "object": object }));
            let chunk = format!("{:x}\r\n{event}\r\n", event.len());
            self.watchers.retain_mut(|watcher| watcher.write_all(chunk.as_bytes()).is_ok());
        }
        if path.starts_with(SLICES) {
            self.tell_slice_watchers("MODIFIED", &object);
        }
        self.by_path.insert(path.to_owned(), object.clone());
        object
    }

    fn tell_slice_watchers(&mut self, kind: &str, object: &Value) {
        let event = format!("{}\n", json!({ "type": kind, "object": object }));
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        self.slice_watchers.retain_mut(|watcher| watcher.write_all(chunk.as_bytes()).is_ok());
    }
}

/// Merges a change into an object as defined by RFC 7396.
fn merge(object: &mut Value, change: &Value) {
    let Value::Object(fields) = change else {
        *object = change.clone();
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (name, value) in fields {
        if value.is_null() {
            object.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut object[name.as_str()], value);
        }
    }
}
