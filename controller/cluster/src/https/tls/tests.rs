use clap::Parser;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    files: TlsFiles,
}

/// Writes a new certificate and its key into `folder`, under the file names of a mounted TLS
/// Secret.
fn write(folder: &Path) {
    let made = rcgen::generate_simple_self_signed(["node".to_owned()]).unwrap();
    std::fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
}

fn shown(folder: &Path) -> Arc<ServedCertificate> {
    let option = |name: &str, file: &str| format!("--{name}={}", folder.join(file).display());
    let line = Line::parse_from([
        "test".to_owned(),
        option("tls-cert-file", "tls.crt"),
        option("tls-key-file", "tls.key"),
    ]);
    line.files.shown(&[]).unwrap()
}

#[test]
fn a_renewed_certificate_is_served() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let shown = shown(folder.path());
    let (first, config) = (shown.fingerprint(), shown.fresh_config().unwrap());
    let same = shown.fresh_config().unwrap();
    assert!(Arc::ptr_eq(&config, &same), "nothing changed");
    write(folder.path());
    let renewed = shown.fresh_config().unwrap();
    assert!(!Arc::ptr_eq(&config, &renewed));
    assert_ne!(first, shown.fingerprint());
}

#[test]
fn half_a_renewal_keeps_the_certificate() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let shown = shown(folder.path());
    let first = shown.fingerprint();
    let key = std::fs::read(folder.path().join("tls.key")).unwrap();
    write(folder.path());
    let renewed = std::fs::read(folder.path().join("tls.key")).unwrap();
    for half in [&key[..], b"", b"no key"] {
        std::fs::write(folder.path().join("tls.key"), half).unwrap();
        assert!(shown.fresh_config().is_some());
        assert_eq!(first, shown.fingerprint());
    }
    std::fs::remove_file(folder.path().join("tls.key")).unwrap();
    assert!(shown.fresh_config().is_some());
    std::fs::write(folder.path().join("tls.key"), renewed).unwrap();
    assert!(shown.fresh_config().is_some());
    assert_ne!(first, shown.fingerprint(), "both files are from the renewal now");
}
