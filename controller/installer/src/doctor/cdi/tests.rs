use super::*;

fn config(text: &str, specs: &Path) -> Table {
    let dirs = format!("{text}cdi_spec_dirs = [\"{}\"]\n", specs.display());
    format!("[plugins.\"{}\"]\n{dirs}", PLUGINS[1]).parse().unwrap()
}

#[test]
fn cdi_needs_more_than_containerds_default() {
    let folder = tempfile::tempdir().unwrap();
    let (on, off) = ("enable_cdi = true\n", "enable_cdi = false\n");
    let [said, silent] = ["said.toml", "silent.toml"].map(|name| folder.path().join(name));
    fs::write(&said, config(on, folder.path()).to_string()).unwrap();
    fs::write(&silent, "version = 3\n").unwrap();
    let [said, silent] = [[said], [silent]];
    assert!(!injects(&config(on, folder.path()), &silent), "the file does not enable CDI");
    assert!(injects(&config(on, folder.path()), &said));
    assert!(!injects(&config(off, folder.path()), &said));
    assert!(!injects(&config("", folder.path()), &said), "containerd 1.6 has no CDI");
    // containerd 2.4 ignores the setting that NVIDIA's toolkit writes, and has CDI always on.
    let mut newest = config("", folder.path());
    newest.insert("version".into(), 4.into());
    assert!(injects(&newest, &said) && !injects(&newest, &silent));
}

#[test]
fn specifications_for_kubernetes_show_cdi() {
    let folder = tempfile::tempdir().unwrap();
    let on = config("enable_cdi = true\n", folder.path());
    let put = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    put("nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n");
    put("broken.json", "{");
    assert!(!injects(&on, &[]), "NVIDIA's toolkit writes nvidia.yaml for any program");
    put("plugin.json", r#"{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu"}"#);
    assert!(injects(&on, &[]));
}
