use std::collections::BTreeSet;

use clap::Parser;
use serde_json::{Value, json};
use time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::JoinSet,
};
use tokio_rustls::{
    TlsAcceptor, TlsConnector,
    rustls::{
        ClientConfig, RootCertStore, crypto,
        pki_types::{CertificateDer, UnixTime, pem::PemObject},
        time_provider::TimeProvider,
    },
};

use super::*;
use crate::webhook::fake::{CONFIGURATION, Fake, SECRET, configuration};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    places: CertificatePaths,
}

fn keeper(fake: &Fake) -> CertificateRotation {
    let places = Line::try_parse_from(["test"]).unwrap().places;
    CertificateRotation::new(fake.client(), places, Arc::default())
}

fn cluster() -> Fake {
    let fake = Fake::default();
    fake.put(CONFIGURATION, configuration());
    fake
}

fn day(number: i64) -> OffsetDateTime {
    OffsetDateTime::UNIX_EPOCH + Duration::days(20_000 + number)
}

/// Returns the published CA bundle, which is the same for all webhooks of the configuration.
fn published(fake: &Fake) -> Vec<u8> {
    let configuration: MutatingWebhookConfiguration =
        serde_json::from_value(fake.get(CONFIGURATION)).unwrap();
    let bundles: BTreeSet<Vec<u8>> = configuration
        .webhooks
        .unwrap()
        .into_iter()
        .map(|webhook| webhook.client_config.ca_bundle.unwrap_or(ByteString(Vec::new())).0)
        .collect();
    assert_eq!(bundles.len(), 1);
    bundles.into_iter().next().unwrap()
}

#[derive(Debug)]
struct At(OffsetDateTime);

impl TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(self.0.unix_timestamp()).unwrap();
        Some(UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds)))
    }
}

/// Returns whether an API server that has this CA bundle accepts the certificate that the webhook
/// presents at the time `now`.
async fn believes(bundle: &[u8], shown: &ServedCertificate, now: OffsetDateTime) -> bool {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle) {
        roots.add(authority.unwrap()).unwrap();
    }
    let provider = Arc::new(crypto::ring::default_provider());
    let config = ClientConfig::builder_with_details(provider, Arc::new(At(now)))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (near, far) = tokio::io::duplex(1 << 16);
    let acceptor = TlsAcceptor::from(shown.config().unwrap());
    let server = tokio::spawn(async move {
        if let Ok(mut stream) = acceptor.accept(far).await {
            let _ = stream.write_all(b"hello").await;
            let _ = stream.shutdown().await;
        }
    });
    let name = "affinode-webhook.affinode.svc".try_into().unwrap();
    let received = match TlsConnector::from(Arc::new(config)).connect(name, near).await {
        Ok(mut stream) => {
            let mut text = String::new();
            stream.read_to_string(&mut text).await.is_ok_and(|_| text == "hello")
        }
        Err(_) => false,
    };
    server.await.unwrap();
    received
}

#[tokio::test]
async fn first_certificate_is_stored_and_trusted() {
    let fake = cluster();
    let keeper = keeper(&fake);
    keeper.round(day(0)).await.unwrap();
    assert!(believes(&published(&fake), &keeper.shown, day(0)).await);
    assert!(!believes(&published(&fake), &keeper.shown, day(91)).await, "it ends");
    let before = fake.writes();
    keeper.round(day(1)).await.unwrap();
    assert_eq!(fake.writes(), before, "nothing is due, so nothing is written");
}

#[tokio::test]
async fn empty_secret_is_filled_and_keeps_its_labels() {
    let fake = cluster();
    fake.put(
        SECRET,
        json!({
            "apiVersion": "v1", "kind": "Secret",
            "metadata": { "name": "affinode-webhook-tls", "labels": { "of": "helm" } },
        }),
    );
    let keeper = keeper(&fake);
    keeper.round(day(0)).await.unwrap();
    assert!(believes(&published(&fake), &keeper.shown, day(0)).await);
    assert_eq!(fake.get(SECRET)["metadata"]["labels"]["of"], "helm");
}

#[tokio::test]
async fn replicas_that_start_together_agree() {
    for _ in 0..20 {
        let fake = cluster();
        let keepers: Vec<Arc<CertificateRotation>> =
            (0..4).map(|_| Arc::new(keeper(&fake))).collect();
        let mut rounds = JoinSet::new();
        for keeper in keepers.clone() {
            rounds.spawn(async move { keeper.round(day(0)).await });
        }
        for round in rounds.join_all().await {
            round.unwrap();
        }
        let (writes, refused) = fake.writes();
        assert_eq!(writes, 2, "one write of the Secret, one of the webhook configuration");
        assert!(refused > 0, "at least one write came too late and was refused");
        for keeper in keepers {
            assert!(believes(&published(&fake), &keeper.shown, day(0)).await);
        }
    }
}

/// Two replicas of the webhook run for ten years, one of them with less frequent rounds. On every
/// tested day, API servers must trust the certificates of both replicas. In these years, the
/// authority and the certificate must be renewed.
#[tokio::test]
async fn replicas_stay_trusted_for_ten_years() {
    let fake = cluster();
    let (prompt, late) = (keeper(&fake), keeper(&fake));
    let (mut bundles, mut certificates) = (BTreeSet::new(), BTreeSet::new());
    for number in (0..10 * 365).step_by(14) {
        let now = day(number);
        // An API server may still have the bundle from before this day's rounds.
        let yesterday = published(&fake);
        prompt.round(now).await.unwrap();
        if number % 28 == 0 {
            late.round(now).await.unwrap();
        }
        for keeper in [&prompt, &late] {
            assert!(believes(&published(&fake), &keeper.shown, now).await, "day {number}");
            assert!(number == 0 || believes(&yesterday, &keeper.shown, now).await, "day {number}");
        }
        bundles.insert(published(&fake));
        certificates.insert(fake.get(SECRET)["data"]["tls.crt"].to_string());
    }
    assert_eq!(bundles.len(), 3, "for four years, one authority is published alone");
    assert!(certificates.len() > 40, "{}", certificates.len());
}

#[tokio::test]
async fn removed_authority_is_published_again() {
    let fake = cluster();
    let keeper = keeper(&fake);
    keeper.round(day(0)).await.unwrap();
    fake.put(CONFIGURATION, configuration());
    assert!(published(&fake).is_empty());
    keeper.round(day(0)).await.unwrap();
    assert!(believes(&published(&fake), &keeper.shown, day(0)).await);
}

#[tokio::test]
async fn damaged_secret_is_repaired_minimally() {
    let fake = cluster();
    let keeper = keeper(&fake);
    keeper.round(day(0)).await.unwrap();
    let (before, trusted) = (fake.get(SECRET), published(&fake));
    let spoil = |change: &dyn Fn(&mut Value)| {
        let mut secret = before.clone();
        change(&mut secret["data"]);
        fake.put(SECRET, secret);
    };
    // If only the certificate is damaged, its authority must stay.
    for key in ["tls.crt", "tls.key"] {
        spoil(&|data| data[key] = "bm9uZQ==".into());
        keeper.round(day(0)).await.unwrap();
        assert_eq!(published(&fake), trusted, "{key}");
        assert!(believes(&trusted, &keeper.shown, day(0)).await, "{key}");
    }
    for key in ["ca.crt", "ca.key"] {
        spoil(&|data| {
            data.as_object_mut().unwrap().remove(key);
        });
        keeper.round(day(0)).await.unwrap();
        assert_ne!(published(&fake), trusted, "{key}");
        assert!(believes(&published(&fake), &keeper.shown, day(0)).await, "{key}");
    }
}

#[tokio::test]
async fn a_certificate_for_another_name_is_replaced() {
    let fake = cluster();
    keeper(&fake).round(day(0)).await.unwrap();
    let places = Line::try_parse_from(["test", "--service", "other"]).unwrap().places;
    let other = CertificateRotation::new(fake.client(), places, Arc::default());
    let trusted = published(&fake);
    other.round(day(0)).await.unwrap();
    assert_eq!(published(&fake), trusted);
    assert!(!believes(&trusted, &other.shown, day(0)).await, "the certificate has the other name");
}

#[tokio::test]
async fn error_names_the_missing_right() {
    let fake = Fake::default();
    let error = keeper(&fake).round(day(0)).await.unwrap_err();
    let text = error_chain::chain(&error);
    assert!(text.contains("MutatingWebhookConfiguration affinode-webhook"), "{text}");
    assert!(text.contains("needs the verbs get and update"), "{text}");
}
