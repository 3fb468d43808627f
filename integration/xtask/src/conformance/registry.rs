//! A registry on loopback with the images that suites ask for, made of the machine's busybox.

use std::{convert::Infallible, path::Path, process::Command, sync::Arc};

use affinode_e2e::image::{Archive, Layer};
use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, header, server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;

use crate::sh;

const BUSYBOX: &str = "/bin/busybox";
const OCTETS: &str = "application/octet-stream";

/// Where it listens: a suite has the names of its images built in.
pub const ADDRESS: &str = "127.0.0.1:5055";

/// Makes the images and serves them from a thread of its own, until the program ends.
pub fn serve() -> Result<()> {
    let images = Arc::new(images()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = runtime
        .block_on(TcpListener::bind(ADDRESS))
        .with_context(|| format!("cannot listen on {ADDRESS}, where the suite pulls from"))?;
    std::thread::spawn(move || runtime.block_on(accept(&listener, &images)));
    Ok(())
}

/// Names that suites use. All of them are the same image.
const NAMES: [&str; 2] = ["alpine:3.14.0", "busybox:1.36"];

fn images() -> Result<Archive> {
    if !Path::new(BUSYBOX).exists() {
        let mut install = Command::new("apt-get");
        install.args(["install", "--yes", "--no-install-recommends", "busybox-static"]);
        sh::read(install.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    let busybox = Path::new(BUSYBOX);
    let mut layer = Layer::base()?;
    layer.copy(busybox, busybox)?;
    for applet in sh::read(Command::new(busybox).arg("--list"))?.lines() {
        if applet != "busybox" {
            layer.link(&Path::new("/bin").join(applet), busybox)?;
        }
    }
    let layer = layer.finish()?;
    let process = json!({"Env": ["PATH=/bin"], "Cmd": ["sh"]});
    let mut images = Archive::default();
    for name in NAMES {
        images.image(name, &layer, &process)?;
    }
    Ok(images)
}

async fn accept(listener: &TcpListener, images: &Arc<Archive>) {
    while let Ok((stream, _)) = listener.accept().await {
        let images = Arc::clone(images);
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let answer = answer(&images, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            // A client that went away is its own affair.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
        });
    }
}

/// The reading half of the OCI distribution protocol: manifests and blobs, whole.
fn answer(images: &Archive, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    let parts: Vec<&str> = path.trim_start_matches("/v2/").split('/').collect();
    let found = match parts.as_slice() {
        [""] => Some((OCTETS, String::new(), Bytes::new())),
        [name, "manifests", tag] if !tag.starts_with("sha256:") => images
            .named(&format!("{name}:{tag}"))
            .and_then(|digest| Some((Archive::MANIFEST, digest, blob(images, digest)?)))
            .map(|(kind, digest, body)| (kind, digest.to_owned(), body)),
        [_, "manifests", digest] => {
            blob(images, digest).map(|body| (Archive::MANIFEST, (*digest).to_owned(), body))
        }
        [_, "blobs", digest] => {
            blob(images, digest).map(|body| (OCTETS, (*digest).to_owned(), body))
        }
        _ => None,
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
