use containerd_shim_protos::api::DeleteResponse;
use proptest::prelude::*;
use tokio::net::UnixStream;
use ttrpc::proto::Status;

use super::*;

/// Task service that records its calls. Its `create` returns the options of the field `options`.
#[derive(Default)]
struct Recorder {
    told: RefCell<Vec<String>>,
    options: Option<Any>,
}

impl TaskService for Recorder {
    async fn create(&self, request: &CreateTaskRequest) -> Option<Any> {
        self.told.borrow_mut().push(format!("create {}", request.id));
        // Lets the task of the other direction run. The order of the frames must not depend on
        // that.
        tokio::task::yield_now().await;
        self.options.clone()
    }

    fn created(&self, id: &str, done: bool) {
        self.told.borrow_mut().push(format!("created {id} {done}"));
    }

    fn deleted(&self, id: &str) {
        self.told.borrow_mut().push(format!("deleted {id}"));
    }
}

fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader { payload_bytes: 0, stream, kind, flags: 0 };
    header.with_payload(payload).unwrap()
}

fn request(stream: u32, service: &str, method: &str, message: &impl Message) -> Vec<u8> {
    let mut request = Request::new();
    request.service = service.to_owned();
    request.method = method.to_owned();
    request.payload = message.write_to_bytes().unwrap();
    request.timeout_nano = 5;
    frame(REQUEST, stream, &request.write_to_bytes().unwrap())
}

fn response(stream: u32, code: Code) -> Vec<u8> {
    let mut response = Response::new();
    if code != Code::OK {
        let mut status = Status::new();
        status.set_code(code);
        response.status = MessageField::some(status);
    }
    response.payload = DeleteResponse::new().write_to_bytes().unwrap();
    frame(RESPONSE, stream, &response.write_to_bytes().unwrap())
}

fn create(id: &str) -> CreateTaskRequest {
    let mut request = CreateTaskRequest::new();
    request.id = id.to_owned();
    request.stdin = "/in".to_owned();
    request.special_fields.mut_unknown_fields().add_varint(99, 7);
    request
}

fn delete(id: &str, exec: &str) -> DeleteRequest {
    let mut request = DeleteRequest::new();
    request.id = id.to_owned();
    request.exec_id = exec.to_owned();
    request
}

/// Runs a proxy between a client that sends `requests` and a stock shim that then sends
/// `responses`. Returns the bytes that the stock shim received, the bytes that the client received,
/// and the result of the proxy.
async fn exchange(
    tasks: &Recorder,
    requests: &[u8],
    responses: &[u8],
) -> (Vec<u8>, Vec<u8>, Result<(), FrameError>) {
    let (mut client, ours) = UnixStream::pair().unwrap();
    let (mut stock, upstream) = UnixStream::pair().unwrap();
    let proxy = async move {
        let (mut read, write) = ours.into_split();
        let first = match read_header(&mut read).await? {
            Some(first) => first,
            None => return Ok(()),
        };
        run(first, (read, write), upstream.into_split(), tasks).await
    };
    let drive = async {
        let (mut to_stock, mut to_client) = (Vec::new(), Vec::new());
        {
            let (mut read, mut write) = stock.split();
            let (_, mut client_write) = client.split();
            let mut got = vec![0; requests.len()];
            // Rewritten requests differ in length, so a sentinel frame ends the test's input and
            // the test reads up to it.
            let sentinel = frame(3, 0xffff_fffd, b"end");
            let send = async {
                client_write.write_all(requests).await.unwrap();
                client_write.write_all(&sentinel).await.unwrap();
            };
            let receive = async {
                while !to_stock.ends_with(&sentinel) {
                    let count = read.read(&mut got).await.unwrap();
                    if count == 0 {
                        return;
                    }
                    to_stock.extend_from_slice(&got[..count]);
                }
                to_stock.truncate(to_stock.len() - sentinel.len());
            };
            tokio::join!(send, receive);
            let _ = write.write_all(responses).await;
        }
        // The stock shim ends: the bytes that it sent must still arrive.
        drop(stock);
        let _ = client.read_to_end(&mut to_client).await;
        (to_stock, to_client)
    };
    let (result, (to_stock, to_client)) = tokio::join!(proxy, drive);
    (to_stock, to_client, result)
}

#[tokio::test]
async fn creates_and_deletes_are_noticed() {
    let tasks = Recorder::default();
    let (v2, v3) = ("containerd.task.v2.Task", "containerd.task.v3.Task");
    let requests = [
        request(1, v3, "Create", &create("a")),
        request(3, v2, "Create", &create("b")),
        request(5, v3, "Delete", &delete("a", "")),
        request(7, v3, "Delete", &delete("a", "exec")),
        request(9, v3, "Delete", &delete("b", "")),
        request(11, "other.Task", "Create", &create("c")),
        request(13, v3, "State", &create("d")),
    ]
    .concat();
    let responses = [
        response(3, Code::ALREADY_EXISTS),
        response(1, Code::OK),
        response(7, Code::OK),
        response(9, Code::NOT_FOUND),
        response(5, Code::OK),
        response(11, Code::OK),
    ]
    .concat();
    let (to_stock, to_client, _) = exchange(&tasks, &requests, &responses).await;
    assert_eq!(to_stock, requests, "the proxy must forward requests unchanged and in order");
    assert_eq!(to_client, responses);
    assert_eq!(
        tasks.told.into_inner(),
        ["create a", "create b", "created b false", "created a true", "deleted a"]
    );
}

#[tokio::test]
async fn new_options_replace_the_old_and_nothing_else() {
    let mut options = Any::new();
    options.type_url = "x.Y".to_owned();
    let tasks = Recorder { options: Some(options.clone()), ..Recorder::default() };
    let before = request(1, "containerd.task.v2.Task", "Create", &create("a"));
    let after = request(3, "containerd.task.v2.Task", "State", &create("a"));
    let sent = [before.clone(), after.clone()].concat();
    let (to_stock, ..) = exchange(&tasks, &sent, b"").await;
    let mut wanted = create("a");
    wanted.options = MessageField::some(options);
    let got = to_stock.strip_suffix(&after[..]).unwrap();
    let header = FrameHeader::decode(got[..HEADER_BYTES].try_into().unwrap()).unwrap();
    assert_eq!((header.stream, header.kind), (1, REQUEST));
    assert_eq!(header.payload_bytes as usize, got.len() - HEADER_BYTES);
    let envelope = Request::parse_from_bytes(&got[HEADER_BYTES..]).unwrap();
    assert_eq!(envelope.timeout_nano, 5);
    let got = CreateTaskRequest::parse_from_bytes(&envelope.payload).unwrap();
    assert_eq!(got, wanted, "unknown fields included");
}

#[tokio::test]
async fn a_frame_that_is_too_long_ends_its_connection() {
    let tasks = Recorder::default();
    let good = frame(3, 1, b"fine");
    let sent = [&good[..], b"\xff\xff\xff\xff\0\0\0\x01\x01\0"].concat();
    let (to_stock, _, result) = exchange(&tasks, &sent, b"").await;
    assert_eq!(to_stock, good);
    assert!(matches!(result, Err(FrameError::TooLong { .. })));
}

fn any_frame() -> impl Strategy<Value = (u8, u32, Vec<u8>)> {
    let payload = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        (1usize..40_000).prop_map(|length| vec![0xa5; length]),
    ];
    (any::<u8>(), 0..0xffff_0000u32, payload)
}

/// Configuration of the property tests. The number of cases is lower than proptest's default,
/// because a case is slow. PROPTEST_CASES overrides it.
fn config() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig::with_cases(asked.unwrap_or(64))
}

proptest! {
    #![proptest_config(config())]
    #[test]
    fn whatever_is_no_create_passes_untouched(
        requests in proptest::collection::vec(any_frame(), 0..8),
        responses in proptest::collection::vec(any_frame(), 0..8),
    ) {
        let bytes = |frames: &[(u8, u32, Vec<u8>)]| -> Vec<u8> {
            frames.iter().flat_map(|(kind, stream, payload)| frame(*kind, *stream, payload)).collect()
        };
        let (requests, responses) = (bytes(&requests), bytes(&responses));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let tasks = Recorder::default();
        let (to_stock, to_client, _) = runtime.block_on(exchange(&tasks, &requests, &responses));
        prop_assert_eq!(to_stock, requests);
        prop_assert_eq!(to_client, responses);
    }
}
