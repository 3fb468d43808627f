//! A TLS client that trusts exactly one certificate: the certificate that the node's agent has
//! published in the cluster. Agents sign their own certificates, so a client cannot check them by a
//! certificate authority.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{self, CryptoProvider, WebPkiSupportedAlgorithms},
    pki_types::{CertificateDer, ServerName, UnixTime},
};

/// SHA-256 digest of a certificate.
pub type Fingerprint = [u8; 32];

/// Parses a fingerprint of 64 hex digits, which is the form in the node's annotation.
#[must_use]
pub fn parse(text: &str) -> Option<Fingerprint> {
    let mut fingerprint = Fingerprint::default();
    if text.len() != 2 * fingerprint.len() || !text.is_ascii() {
        return None;
    }
    for (at, byte) in fingerprint.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(fingerprint)
}

/// Returns a TLS configuration that accepts only a peer with this certificate and its key.
///
/// # Errors
/// If the crypto provider supports none of the default TLS versions.
pub fn client(fingerprint: Fingerprint) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(crypto::ring::default_provider());
    let pinned = PinnedCertificate { fingerprint, algorithms: algorithms(&provider) };
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pinned))
        .with_no_client_auth())
}

fn algorithms(provider: &CryptoProvider) -> WebPkiSupportedAlgorithms {
    provider.signature_verification_algorithms
}

#[derive(Debug)]
struct PinnedCertificate {
    fingerprint: Fingerprint,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PinnedCertificate {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _between: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _stapled: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let seen: Fingerprint = Sha256::digest(certificate).into();
        if seen == self.fingerprint {
            return Ok(ServerCertVerified::assertion());
        }
        Err(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_64_hex_digits() {
        assert_eq!(parse(&"0a".repeat(32)), Some([10; 32]));
        let long = "0a".repeat(33);
        for wrong in ["", "0a", &"zz".repeat(32), &"é".repeat(32), &long] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
