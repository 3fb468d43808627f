//! The certificate that is shown, which changes while connections come in.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use clap::Args;
use sha2::{Digest, Sha256};
use tokio_rustls::rustls::{
    self, ServerConfig, crypto,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
};

/// Why there is no certificate to show.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}, which {option} names", path.display())]
    File {
        /// The option of the command.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It holds something else.
    #[error("the {0} is no PEM file of one")]
    Pem(&'static str, #[source] pem::Error),
    /// They do not belong together.
    #[error("certificate and key do not belong together")]
    Pair(#[from] rustls::Error),
    /// None can be made.
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
}

/// Where the certificate is from.
#[derive(Args, Clone, Debug)]
pub struct TlsFiles {
    /// A PEM file with the certificate; one is made for this run when left out.
    #[arg(long, value_name = "FILE", requires = "tls_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// A PEM file with the certificate's key.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,
}

impl TlsFiles {
    /// Shows what is in the files, or one that is made now, for these names and this machine.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn shown(&self, names: &[String]) -> Result<Arc<ServedCertificate>, TlsError> {
        let pair = match (&self.tls_cert_file, &self.tls_key_file) {
            (Some(cert), Some(key)) => read(cert, key)?,
            _ => {
                let names = [names, &["localhost".to_owned()]].concat();
                let made = rcgen::generate_simple_self_signed(names)?;
                let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
                TlsPair { cert, key }
            }
        };
        let shown = ServedCertificate::default();
        shown.show(&pair)?;
        Ok(Arc::new(shown))
    }
}

/// A certificate and its key, as PEM files have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPair {
    /// The certificate, and those between it and the authority.
    pub cert: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
}

impl TlsPair {
    /// Whether it could be shown.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.config().is_ok()
    }

    /// When the certificate ends, in Unix time.
    fn not_after(&self) -> Option<i64> {
        let der = CertificateDer::from_pem_slice(&self.cert).ok()?;
        let (_, certificate) = x509_parser::parse_x509_certificate(&der).ok()?;
        Some(certificate.validity().not_after.timestamp())
    }

    fn config(&self) -> Result<ServerConfig, TlsError> {
        let certificates = CertificateDer::pem_slice_iter(&self.cert)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| TlsError::Pem("certificate", e))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|e| TlsError::Pem("key", e))?;
        Ok(ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(certificates, key)?)
    }
}

/// What is shown at the next connection. It is replaced whole, and what is of no use replaces nothing.
#[derive(Debug, Default)]
pub struct ServedCertificate(Mutex<Option<CurrentTls>>);

#[derive(Debug)]
struct CurrentTls {
    pair: TlsPair,
    config: Arc<ServerConfig>,
    not_after_seconds: Option<i64>,
}

impl ServedCertificate {
    /// Shows these from now on. Says whether they are others than before.
    ///
    /// # Errors
    /// [`TlsError`]; those before are shown further.
    pub fn show(&self, pair: &TlsPair) -> Result<bool, TlsError> {
        let mut shown = self.lock();
        if shown.as_ref().is_some_and(|current| current.pair == *pair) {
            return Ok(false);
        }
        let config = Arc::new(pair.config()?);
        *shown =
            Some(CurrentTls { pair: pair.clone(), config, not_after_seconds: pair.not_after() });
        Ok(true)
    }

    /// What is shown, when there is something.
    #[must_use]
    pub fn config(&self) -> Option<Arc<ServerConfig>> {
        self.lock().as_ref().map(|current| Arc::clone(&current.config))
    }

    /// When it ends, in Unix time.
    #[must_use]
    pub fn not_after_seconds(&self) -> Option<i64> {
        self.lock().as_ref().and_then(|current| current.not_after_seconds)
    }

    /// SHA-256 of what is shown, in hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> Option<String> {
        let der = CertificateDer::from_pem_slice(&self.lock().as_ref()?.pair.cert).ok()?;
        Some(Sha256::digest(&der).iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn lock(&self) -> MutexGuard<'_, Option<CurrentTls>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a pair of files.
///
/// # Errors
/// [`TlsError::File`].
pub fn read(cert: &Path, key: &Path) -> Result<TlsPair, TlsError> {
    let read = |option, path: &Path| {
        let fail = |source| TlsError::File { option, path: path.to_owned(), source };
        std::fs::read(path).map_err(fail)
    };
    Ok(TlsPair { cert: read("--tls-cert-file", cert)?, key: read("--tls-key-file", key)? })
}
