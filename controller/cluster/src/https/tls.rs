//! The certificate that a server presents. It can be replaced while the server runs. A certificate
//! from files is read again at each connection, because another program, such as cert-manager,
//! renews the files.

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

use crate::error_chain;

/// Reason why a TLS certificate cannot be loaded or created.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A certificate or key file cannot be read.
    #[error("cannot read {}, the file given by {option}", path.display())]
    File {
        /// Command-line option that names the file.
        option: &'static str,
        /// Path of the certificate or key file.
        path: PathBuf,
        /// I/O error of the failed read.
        #[source]
        source: io::Error,
    },
    /// A PEM file does not contain the expected kind of object.
    #[error("the TLS {0} is not in PEM form")]
    Pem(&'static str, #[source] pem::Error),
    /// The key does not match the certificate.
    #[error("the TLS key does not match the TLS certificate")]
    Pair(#[from] rustls::Error),
    /// The self-signed certificate could not be created.
    #[error("cannot create a self-signed certificate")]
    Make(#[from] rcgen::Error),
}

/// Options for the certificate and its key.
#[derive(Args, Clone, Debug)]
pub struct TlsFiles {
    /// PEM file with the certificate. If omitted, a self-signed certificate is created for this
    /// run.
    #[arg(long, value_name = "FILE", requires = "tls_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// PEM file with the certificate's key.
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_key_file: Option<PathBuf>,
}

impl TlsFiles {
    /// Returns the certificate that the server presents. If the options name files, the certificate
    /// comes from them. Otherwise this function creates a self-signed certificate for `names` and
    /// for `localhost`.
    ///
    /// # Errors
    /// [`TlsError`]: the files are invalid, or no certificate can be created.
    pub fn shown(&self, names: &[String]) -> Result<Arc<ServedCertificate>, TlsError> {
        let shown = match (&self.tls_cert_file, &self.tls_key_file) {
            (Some(cert), Some(key)) => ServedCertificate::of_files(cert, key)?,
            _ => {
                let names = [names, &["localhost".to_owned()]].concat();
                let made = rcgen::generate_simple_self_signed(names)?;
                let (cert, key) = (made.cert.pem().into(), made.signing_key.serialize_pem().into());
                let shown = ServedCertificate::default();
                shown.show(&TlsPair { cert, key })?;
                shown
            }
        };
        Ok(Arc::new(shown))
    }
}

/// A certificate and its key in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPair {
    /// The certificate, followed by intermediate certificates if there are any.
    pub cert: Vec<u8>,
    /// Private key of the certificate.
    pub key: Vec<u8>,
}

impl TlsPair {
    /// Returns whether the certificate and the key can be parsed and belong together.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        self.config().is_ok()
    }

    /// Returns the end of the certificate's validity, in seconds since 1970.
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

/// The certificate that the server presents to the next connection. A new pair of certificate and
/// key replaces the present pair only if the new pair is valid.
#[derive(Debug, Default)]
pub struct ServedCertificate {
    current: Mutex<Option<CurrentTls>>,
    /// Paths of the certificate file and the key file. `None`: the certificate does not come from
    /// files.
    files: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug)]
struct CurrentTls {
    pair: TlsPair,
    config: Arc<ServerConfig>,
    not_after_seconds: Option<i64>,
}

impl ServedCertificate {
    /// Creates a certificate that is read from a certificate file and a key file. Both files are
    /// read again at each connection.
    ///
    /// # Errors
    /// [`TlsError`]: the files do not contain a valid pair now.
    pub fn of_files(cert: &Path, key: &Path) -> Result<ServedCertificate, TlsError> {
        let files = Some((cert.to_owned(), key.to_owned()));
        let shown = ServedCertificate { current: Mutex::default(), files };
        shown.show(&read(cert, key)?)?;
        Ok(shown)
    }

    /// Reloads the certificate, if it comes from files. An invalid pair of certificate and key is
    /// logged and not used, because another program may be writing the files at this time.
    pub fn refresh(&self) {
        let Some((cert, key)) = &self.files else { return };
        match read(cert, key).and_then(|pair| self.show(&pair)) {
            Ok(true) => {
                tracing::info!("certificate: serving the certificate in {}", cert.display())
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(
                "certificate: cannot reload {cert:?} with its key {key:?}, so the earlier \
                 certificate stays in use: {}",
                error_chain::chain(&error)
            ),
        }
    }

    /// Reloads the certificate, if it comes from files, and returns the TLS configuration of the
    /// current pair of certificate and key.
    #[must_use]
    pub fn fresh_config(&self) -> Option<Arc<ServerConfig>> {
        self.refresh();
        self.config()
    }

    /// Makes the server present `pair` from now on. Returns false if the server presents this pair
    /// already.
    ///
    /// # Errors
    /// [`TlsError`]: the pair is invalid. The server keeps the present pair.
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

    /// Returns the TLS configuration of the current certificate and key. `None`: there is no
    /// certificate yet.
    #[must_use]
    pub fn config(&self) -> Option<Arc<ServerConfig>> {
        self.lock().as_ref().map(|current| Arc::clone(&current.config))
    }

    /// Returns the end of the current certificate's validity, in seconds since 1970.
    #[must_use]
    pub fn not_after_seconds(&self) -> Option<i64> {
        self.lock().as_ref().and_then(|current| current.not_after_seconds)
    }

    /// Returns the SHA-256 of the current certificate, as hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> Option<String> {
        let der = CertificateDer::from_pem_slice(&self.lock().as_ref()?.pair.cert).ok()?;
        Some(Sha256::digest(&der).iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn lock(&self) -> MutexGuard<'_, Option<CurrentTls>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads certificate and key from two files.
fn read(cert: &Path, key: &Path) -> Result<TlsPair, TlsError> {
    let read = |option, path: &Path| {
        let fail = |source| TlsError::File { option, path: path.to_owned(), source };
        std::fs::read(path).map_err(fail)
    };
    Ok(TlsPair { cert: read("--tls-cert-file", cert)?, key: read("--tls-key-file", key)? })
}

#[cfg(test)]
mod tests;
