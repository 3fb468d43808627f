//! Creates the webhook's certificate authorities and the certificates that they sign, and converts
//! them to and from the data of a Secret.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::plan::{AUTHORITY_USE, StoredCertificate};
use crate::https::tls::TlsPair;

/// Validity of a certificate authority. It can be long, because only clients of this webhook trust
/// the authority.
const AUTHORITY_TIME: Duration = Duration::days(5 * 365);
/// Validity of the webhook's certificate. An authority signs a certificate only if the authority
/// itself is valid for at least this time.
const LEAF_TIME: Duration = AUTHORITY_USE;
/// Time by which the validity of a certificate begins before its creation. It covers API servers
/// whose clocks are behind.
const SKEW: Duration = Duration::hours(1);

/// Error for a key or certificate that could not be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot create a certificate for the webhook")]
pub struct IssueError(#[from] rcgen::Error);

/// An authority, its key, and a certificate with its key, all in PEM form. They are the content of
/// the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// Authorities in PEM, newest first.
    authorities: Vec<String>,
    authority_key: String,
    cert: String,
    key: String,
}

impl IssuedCertificate {
    /// Creates an authority and a certificate for these names.
    ///
    /// # Errors
    /// [`IssueError`]: a key or certificate could not be created.
    pub fn make(names: &[String], now: OffsetDateTime) -> Result<IssuedCertificate, IssueError> {
        let (authority, authority_key) = authority(now)?;
        let (cert, key) = leaf(&authority, &authority_key, names, now)?;
        Ok(IssuedCertificate { authorities: vec![authority], authority_key, cert, key })
    }

    /// Returns a copy of this content with a new authority in addition to the present authorities.
    /// Expired authorities are left out.
    ///
    /// # Errors
    /// [`IssueError`]: the authority could not be created.
    pub fn with_new_authority(&self, now: OffsetDateTime) -> Result<IssuedCertificate, IssueError> {
        let (authority, authority_key) = authority(now)?;
        let good = |pem: &&String| ends(pem).is_some_and(|ends| ends > now);
        let old = self.authorities.iter().filter(good).cloned();
        let authorities = std::iter::once(authority).chain(old).collect();
        Ok(IssuedCertificate { authorities, authority_key, ..self.clone() })
    }

    /// Returns a copy in which the certificate is replaced by a new certificate, signed by the
    /// newest authority.
    ///
    /// # Errors
    /// [`IssueError`]: the certificate could not be created.
    pub fn with_new_leaf(
        &self,
        names: &[String],
        now: OffsetDateTime,
    ) -> Result<IssuedCertificate, IssueError> {
        let (cert, key) = leaf(&self.authorities[0], &self.authority_key, names, now)?;
        Ok(IssuedCertificate { cert, key, ..self.clone() })
    }

    /// Parses the data of a Secret. `None`: an authority or its key is invalid.
    #[must_use]
    pub fn read(data: &BTreeMap<String, ByteString>) -> Option<IssuedCertificate> {
        let text = |key: &str| String::from_utf8(data.get(key)?.0.clone()).ok();
        let bundle = text("ca.crt")?;
        let authorities = split(&bundle);
        let authority_key = text("ca.key")?;
        let newest = authorities.first()?;
        Issuer::from_ca_cert_pem(newest, KeyPair::from_pem(&authority_key).ok()?).ok()?;
        let (cert, key) =
            (text("tls.crt").unwrap_or_default(), text("tls.key").unwrap_or_default());
        Some(IssuedCertificate { authorities, authority_key, cert, key })
    }

    /// Returns the content in the form of a Secret's data.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, ByteString> {
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        BTreeMap::from([
            ("ca.crt".to_owned(), ByteString(self.bundle())),
            ("ca.key".to_owned(), bytes(&self.authority_key)),
            ("tls.crt".to_owned(), bytes(&self.cert)),
            ("tls.key".to_owned(), bytes(&self.key)),
        ])
    }

    /// Returns the authorities in PEM form, as the CA bundle for API servers.
    #[must_use]
    pub fn bundle(&self) -> Vec<u8> {
        self.authorities.concat().into_bytes()
    }

    /// Returns the certificate and the key that the webhook presents.
    #[must_use]
    pub fn pair(&self) -> TlsPair {
        TlsPair { cert: self.cert.clone().into_bytes(), key: self.key.clone().into_bytes() }
    }

    /// Returns the validity of the authority and of the certificate, for [`super::plan`].
    #[must_use]
    pub fn stored(&self, names: &[String]) -> Option<StoredCertificate> {
        let authority_ends = self.authorities.first().and_then(|pem| ends(pem))?;
        let of_use = self.pair().is_usable() && self.is_ours(names).unwrap_or(false);
        let leaf_ends = ends(&self.cert).filter(|_| of_use);
        Some(StoredCertificate { authority_ends, leaf_ends })
    }

    /// Returns whether the certificate is for all of these names and is signed by one of the
    /// authorities. `None`: the certificate cannot be parsed.
    fn is_ours(&self, names: &[String]) -> Option<bool> {
        let leaf = der(&self.cert)?;
        let (_, leaf) = X509Certificate::from_der(&leaf).ok()?;
        let alternatives = leaf.subject_alternative_name().ok()??;
        let named = names.iter().all(|name| {
            let same = |held: &GeneralName| matches!(held, GeneralName::DNSName(n) if n == name);
            alternatives.value.general_names.iter().any(same)
        });
        let signed = self.authorities.iter().filter_map(|pem| der(pem)).any(|authority| {
            X509Certificate::from_der(&authority)
                .is_ok_and(|(_, ca)| leaf.verify_signature(Some(ca.public_key())).is_ok())
        });
        Some(named && signed)
    }
}

fn authority(now: OffsetDateTime) -> Result<(String, String), IssueError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, format!("affinode webhook, {}", now.date()));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    (params.not_before, params.not_after) = (now - SKEW, now + AUTHORITY_TIME);
    let key = KeyPair::generate()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

fn leaf(
    authority: &str,
    authority_key: &str,
    names: &[String],
    now: OffsetDateTime,
) -> Result<(String, String), IssueError> {
    let issuer = Issuer::from_ca_cert_pem(authority, KeyPair::from_pem(authority_key)?)?;
    let mut params = CertificateParams::new(names.to_vec())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    if let Some(name) = names.first() {
        // A common name may have at most 64 characters.
        params
            .distinguished_name
            .push(DnType::CommonName, name.chars().take(64).collect::<String>());
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    (params.not_before, params.not_after) = (now - SKEW, now + LEAF_TIME);
    let key = KeyPair::generate()?;
    Ok((params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
}

/// Splits a PEM bundle into its certificates.
fn split(bundle: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    bundle
        .split_inclusive(END)
        .filter(|part| part.ends_with(END))
        .map(|part| format!("{}\n", part.trim_start()))
        .collect()
}

fn der(pem: &str) -> Option<CertificateDer<'static>> {
    CertificateDer::from_pem_slice(pem.as_bytes()).ok()
}

fn ends(pem: &str) -> Option<OffsetDateTime> {
    let der = der(pem)?;
    let (_, certificate) = X509Certificate::from_der(&der).ok()?;
    Some(certificate.validity().not_after.to_datetime())
}
