use std::net::Ipv4Addr;

use http_body_util::Full;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName},
    },
};

use super::*;

/// Time limit for an action that a test expects of the server.
const PATIENCE: Duration = Duration::from_secs(60);
const PER_ADDRESS: usize = 2;
const SILENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

struct TestSite(Arc<ServerConfig>);

impl HttpsSite for TestSite {
    type Body = Full<Bytes>;
    const LIMITS: HttpsLimits = HttpsLimits {
        connections: PER_ADDRESS + 1,
        connections_per_address: PER_ADDRESS,
        handshake: Duration::from_secs(3600),
        head: Duration::from_secs(3600),
    };

    fn papers(&self) -> Option<Arc<ServerConfig>> {
        Some(Arc::clone(&self.0))
    }

    async fn answer(&self, _: Request<Incoming>) -> Response<Full<Bytes>> {
        Response::new(Full::from("here"))
    }
}

/// Starts the server. Returns its address, and a client that trusts its certificate.
async fn start() -> (SocketAddr, TlsConnector) {
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let made = rcgen::generate_simple_self_signed(["site".to_owned()]).unwrap();
    let certificate: CertificateDer = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, Arc::new(TestSite(Arc::new(config)))));
    (address, TlsConnector::from(Arc::new(client)))
}

async fn connect(from: Ipv4Addr, server: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    socket.connect(server).await.unwrap()
}

async fn ask(stream: TcpStream, client: &TlsConnector) -> io::Result<String> {
    let mut stream = client.connect(ServerName::try_from("site").unwrap(), stream).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: site\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// A client opens more connections than the server serves, and sends nothing. Another client must
/// still get a reply.
#[tokio::test]
async fn silent_address_does_not_exclude_others() {
    let (server, client) = start().await;
    let mut silent = Vec::new();
    for _ in 0..=PER_ADDRESS {
        silent.push(connect(SILENT, server).await);
    }
    let probe = connect(Ipv4Addr::LOCALHOST, server).await;
    let answer = timeout(PATIENCE, ask(probe, &client)).await.expect("a reply in time").unwrap();
    assert!(answer.ends_with("here"), "{answer}");
    let mut excess = silent.pop().unwrap();
    let closed = timeout(PATIENCE, excess.read(&mut [0])).await.expect("the end in time");
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    drop(silent);
    // The server counts the ended connections no longer, but learns of their end at some time.
    let again = async {
        while ask(connect(SILENT, server).await, &client).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("the address can connect again in time");
}
