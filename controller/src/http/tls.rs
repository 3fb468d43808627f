//! Serves HTTPS if the configuration names a certificate. The files are read for each connection,
//! because they may be renewed at any time.

use std::{io, path::PathBuf, sync::Arc};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig, crypto,
        pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
    },
    server::TlsStream,
};

/// Reason why HTTPS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of the TLS identity cannot be read, or has no certificate or key.
    #[error("cannot read {path}, the file of the setting http.{key}")]
    File {
        /// Configuration key in section `[http]` that names the file.
        key: &'static str,
        /// Path of the invalid file.
        path: PathBuf,
        /// Error of reading or parsing the file.
        #[source]
        source: pem::Error,
    },
    /// The certificate and the key do not match.
    #[error("cannot use the certificate of http.tls_cert_file with the key of http.tls_key_file")]
    Pair(#[from] rustls::Error),
    /// The TLS handshake with a client failed.
    #[error("the TLS handshake with the client failed")]
    Handshake(#[source] io::Error),
}

/// Paths of a TLS certificate and its key.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    cert_file: PathBuf,
    key_file: PathBuf,
}

impl TlsIdentity {
    /// Creates an identity from the files of a certificate and its key, which must be valid now.
    ///
    /// # Errors
    /// [`TlsError`]: a file is invalid, or certificate and key do not match.
    pub fn new(cert_file: &str, key_file: &str) -> Result<TlsIdentity, TlsError> {
        let papers = TlsIdentity { cert_file: cert_file.into(), key_file: key_file.into() };
        papers.read()?;
        Ok(papers)
    }

    /// Accepts a TLS connection: reads the files and performs the handshake.
    ///
    /// # Errors
    /// [`TlsError`]: a file is invalid, or the handshake failed.
    pub async fn accept<S>(&self, stream: S) -> Result<TlsStream<S>, TlsError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let acceptor = TlsAcceptor::from(Arc::new(self.read()?));
        acceptor.accept(stream).await.map_err(TlsError::Handshake)
    }

    fn read(&self) -> Result<ServerConfig, TlsError> {
        let fail = |key, path: &PathBuf| {
            let path = path.clone();
            move |source| TlsError::File { key, path, source }
        };
        let certificates = CertificateDer::pem_file_iter(&self.cert_file)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(fail("tls_cert_file", &self.cert_file))?;
        let key = PrivateKeyDer::from_pem_file(&self.key_file)
            .map_err(fail("tls_key_file", &self.key_file))?;
        Ok(ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };
    use tokio_rustls::{
        TlsConnector,
        rustls::{ClientConfig, RootCertStore},
    };

    use super::*;
    use crate::{
        config::{HttpSection, ListenAddress},
        http::{HttpListener, review::fake, serve, stage::run_behind},
    };

    async fn ask(address: &str, ca: &std::path::Path) -> io::Result<String> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(address).await?;
        let name = "127.0.0.1".try_into().unwrap();
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let request =
            format!("GET /healthz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn renewed_certificates_are_used_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let papers = fake::papers(folder.path());
        let site = run_behind(tempfile::tempdir().unwrap(), true, &HttpSection::default()).site;
        let listen = ListenAddress::Tcp("127.0.0.1:0".parse().unwrap());
        let (bound, place) = HttpListener::bind(&listen).unwrap().unwrap();
        tokio::spawn(serve(HttpListener::new(bound, Some(papers)).unwrap(), site));
        let address = place.trim_start_matches("http://");
        let ca = folder.path().join("ca.crt");
        let old = std::fs::read(&ca).unwrap();
        assert!(ask(address, &ca).await.unwrap().starts_with("HTTP/1.1 200"));
        // The files are renewed now. A client that trusts only the new certificate authority must
        // then be served.
        fake::papers(folder.path());
        assert!(ask(address, &ca).await.unwrap().starts_with("HTTP/1.1 200"));
        std::fs::write(&ca, old).unwrap();
        assert!(ask(address, &ca).await.is_err(), "the old ones are not shown any more");
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "in clear");
    }

    #[test]
    fn an_invalid_certificate_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fake::papers(folder.path());
        let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let fail = |cert: &str, key: &str| {
            crate::error_chain::chain(&TlsIdentity::new(&file(cert), &file(key)).unwrap_err())
        };
        assert!(fail("missing", "server.key").contains("http.tls_cert_file"));
        assert!(fail("server.crt", "ca.crt").contains("http.tls_key_file"));
        assert!(fail("ca.crt", "server.key").contains("cannot use the certificate"));
    }
}
