//! A registry on loopback with the images that the suites pull. The images are built from the
//! machine's busybox.

use std::{
    convert::Infallible,
    fs::File,
    path::Path,
    process::Command,
    sync::{OnceLock, mpsc},
};

use affinode_e2e::image::{Archive, Layer};
use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, header, server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    runtime::{self, Runtime},
};

use crate::sh;

const BUSYBOX: &str = "/bin/busybox";
const OCTETS: &str = "application/octet-stream";

/// Address of the registry. It is fixed, because the names of the images are built into the suites.
pub const ADDRESS: &str = "127.0.0.1:5055";

/// Serves the images on a thread until the program ends. The registry listens on the loopback
/// interface of the network namespace `network`. If `network` is `None`, it listens on the
/// machine's own loopback interface.
pub fn serve(network: Option<File>) -> Result<()> {
    images()?;
    let (told, ready) = mpsc::channel();
    std::thread::spawn(move || {
        let listening = || -> Result<(Runtime, TcpListener)> {
            if let Some(network) = network {
                // `setns` changes the network namespace of this thread only.
                setns(network, CloneFlags::CLONE_NEWNET)?;
            }
            let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
            let listener = runtime.block_on(TcpListener::bind(ADDRESS))?;
            Ok((runtime, listener))
        };
        match listening() {
            Ok((runtime, listener)) => {
                let _ = told.send(Ok(()));
                runtime.block_on(accept(&listener));
            }
            Err(error) => drop(told.send(Err(error))),
        }
    });
    ready.recv()?.with_context(|| format!("cannot listen on {ADDRESS}, where suites pull from"))
}

/// Returns the SHA-256 of an image's manifest, in hex.
pub fn digest(name: &str) -> Result<String> {
    let digest = images()?.named(name).and_then(|digest| digest.strip_prefix("sha256:"));
    digest.map(ToOwned::to_owned).with_context(|| format!("there is no image {name}"))
}

/// Name of the image that a suite pulls by its digest.
pub const DIGESTED: &str = "k8s-staging-cri-tools/test-image-digest:latest";
/// Names of the images that start a shell. Names that differ only in the tag refer to the same
/// image.
const NAMES: [&str; 14] = [
    "alpine:3.14.0",
    "busybox:1.36",
    "e2e-test-images/busybox:1.29-2",
    "pause:3.9",
    "k8s-staging-cri-tools/test-image-latest:latest",
    "k8s-staging-cri-tools/test-image-tag:test",
    "k8s-staging-cri-tools/test-image-tag:all",
    DIGESTED,
    "k8s-staging-cri-tools/test-image-1:latest",
    "k8s-staging-cri-tools/test-image-2:latest",
    "k8s-staging-cri-tools/test-image-3:latest",
    "k8s-staging-cri-tools/test-image-tags:1",
    "k8s-staging-cri-tools/test-image-tags:2",
    "k8s-staging-cri-tools/test-image-tags:3",
];
/// Names of images whose program runs as a certain user, each with the user.
const USERS: [(&str, &str); 5] = [
    ("test-image-user-uid", "1002"),
    ("test-image-user-username", "www-data"),
    ("test-image-user-uid-group", "1003:1003"),
    ("test-image-user-username-group", "www-data:www-data"),
    ("test-image-predefined-group", "1000"),
];
/// Names of images that serve a web page, each with the port.
const SERVERS: [(&str, &str); 3] = [
    ("e2e-test-images/nginx:1.14-2", "80"),
    ("e2e-test-images/httpd:2.4.39-4", "80"),
    ("k8s-staging-cri-tools/hostnet-nginx-amd64:latest", "12003"),
];
/// Script that the images contain in place of nginx. It serves a web page and ends at SIGTERM.
/// Tests check the script's process name, the command line of the container's first process, and
/// the pid file.
const NGINX: &[u8] = b"#!/bin/sh
echo $$ > /var/run/nginx.pid
trap exit TERM
httpd -f -p \"$2\" -h /srv &
wait
";
/// Script that is installed as `pgrep`, which the machine's busybox does not have.
const PGREP: &[u8] = b"#!/bin/sh
for process in /proc/[0-9]*; do
    [ \"$(cat $process/comm 2> /dev/null)\" = \"$1\" ] && echo ${process#/proc/}
done
";
const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\n\
    default-user:x:1000:1000::/home:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n";
const GROUP: &str = "root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\n\
    group-defined-in-image:x:50000:default-user\nnobody:x:65534:\n";

/// Returns the archive of all images, which is created once.
fn images() -> Result<&'static Archive> {
    static IMAGES: OnceLock<Archive> = OnceLock::new();
    if let Some(made) = IMAGES.get() {
        return Ok(made);
    }
    let made = make()?;
    Ok(IMAGES.get_or_init(|| made))
}

fn make() -> Result<Archive> {
    let layer = layer()?;
    let mut images = Archive::default();
    let mut add = |name: &str, more: &[(&str, Value)]| {
        let (repository, _) = name.split_once(':').unwrap_or((name, ""));
        let mut process =
            json!({"Env": ["PATH=/bin"], "Cmd": ["sh"], "Labels": {"repository": repository}});
        more.iter().for_each(|(field, value)| process[*field] = value.clone());
        images.image(name, &layer, &process)
    };
    for name in NAMES {
        add(name, &[])?;
    }
    for (name, user) in USERS {
        add(&format!("k8s-staging-cri-tools/{name}:latest"), &[("User", json!(user))])?;
    }
    for (name, port) in SERVERS {
        add(name, &[("Cmd", json!(["/bin/nginx", "master process", port]))])?;
    }
    Ok(images)
}

/// Builds the file system layer that all images share.
fn layer() -> Result<Vec<u8>> {
    if !Path::new(BUSYBOX).exists() {
        let mut install = Command::new("apt-get");
        install.args(["install", "--yes", "--no-install-recommends", "busybox-static"]);
        sh::read(install.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    let busybox = Path::new(BUSYBOX);
    // CRI-O refuses a layer that has two files of the same path.
    let mut layer = Layer::with_users(PASSWD, GROUP)?;
    layer.folder("home", 0o777)?;
    layer.folder("var/run", 0o755)?;
    layer.file("srv/index.html", 0o644, b"It works.\n")?;
    layer.file("bin/nginx", 0o755, NGINX)?;
    layer.file("bin/pgrep", 0o755, PGREP)?;
    layer.copy(busybox, busybox)?;
    // A test mounts another file over `/bin/ls`. If `/bin/ls` were a link to busybox, the mount
    // would hide all other applets as well.
    layer.copy(busybox, Path::new("/bin/ls"))?;
    for applet in sh::read(Command::new(busybox).arg("--list"))?.lines() {
        if !["busybox", "ls", "pgrep"].contains(&applet) {
            layer.link(&Path::new("/bin").join(applet), busybox)?;
        }
    }
    layer.finish()
}

async fn accept(listener: &TcpListener) {
    let Ok(images) = images() else { return };
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let answer = answer(images, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            // An error of a connection affects only its client, so it is ignored.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
        });
    }
}

/// Answers a read request of the OCI distribution protocol, for a manifest or a whole blob.
fn answer(images: &Archive, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path().trim_start_matches("/v2/");
    let split = |word: &str| path.split_once(word);
    let found = if path.is_empty() {
        Some((OCTETS, String::new(), Bytes::new()))
    } else if let Some((name, tag)) = split("/manifests/") {
        let digest =
            if tag.contains(':') { Some(tag) } else { images.named(&format!("{name}:{tag}")) };
        digest
            .and_then(|digest| Some((Archive::MANIFEST, digest.to_owned(), blob(images, digest)?)))
    } else if let Some((_, digest)) = split("/blobs/") {
        blob(images, digest).map(|body| (OCTETS, digest.to_owned(), body))
    } else {
        None
    };
    let Some((kind, digest, body)) = found else {
        let mut missing = Response::default();
        *missing.status_mut() = StatusCode::NOT_FOUND;
        return missing;
    };
    let length = body.len();
    let body = if request.method() == Method::HEAD { Bytes::new() } else { body };
    Response::builder()
        .header(header::CONTENT_TYPE, kind)
        .header(header::CONTENT_LENGTH, length)
        .header("Docker-Content-Digest", digest)
        .body(Full::new(body))
        .unwrap_or_default()
}

fn blob(images: &Archive, digest: &str) -> Option<Bytes> {
    images.blob(digest.strip_prefix("sha256:")?).map(Bytes::copy_from_slice)
}
