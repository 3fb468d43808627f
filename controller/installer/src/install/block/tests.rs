use super::{
    super::handler::{HandlerVerdict, cri},
    *,
};
use crate::doctor::handler::RUNTIME_TYPE;

const V2: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
privileged_without_host_devices = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
Root = ""
"#;

const SHIM: &str = "/opt/bin/containerd-shim-affinode-v1";

fn table(text: &str) -> Table {
    text.parse().unwrap()
}

fn spec(name: &str) -> HandlerSpec {
    HandlerSpec::new(name, "/opt".as_ref(), None, false)
}

#[test]
fn the_handler_is_a_copy_of_nvidias_as_our_shim() {
    let nvidia = r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "/etc/spec.json"
pod_annotations = ["nvidia.com/*"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"#;
    let dump = table(&format!("{V2}{nvidia}"));
    let text = text(&dump, &dump, 2, &spec("affinode")).unwrap();
    let after = table(&format!("{V2}{nvidia}{text}"));
    let ours = cri(&after).unwrap()["runtimes"]["affinode"].clone();
    assert_eq!(ours["runtime_type"].as_str(), Some(RUNTIME_TYPE));
    assert_eq!(ours["base_runtime_spec"].as_str(), Some("/etc/spec.json"));
    assert_eq!(ours["pod_annotations"].as_array().unwrap().len(), 2);
    let binary = ours["options"]["BinaryName"].as_str();
    assert_eq!(binary, Some("/usr/bin/nvidia-container-runtime"));
    assert_eq!(spec("affinode").judge(&after), HandlerVerdict::Same);
}

/// containerd 2 queries only runtimes of the stock type for their features. Therefore the handler
/// must have the stock type and the path of Affinode's shim, which reports the features of the
/// stock shim.
#[test]
fn containerd_2_asks_our_shim_what_it_can_do() {
    let dump = V2.replace("version = 2", "version = 3").replace(PLUGINS[0], PLUGINS[1]);
    let text = text(&table(&dump), &table(&dump), 3, &spec("affinode")).unwrap();
    let after = table(&format!("{dump}{text}"));
    let ours = &cri(&after).unwrap()["runtimes"]["affinode"];
    assert_eq!(ours["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
    assert_eq!(ours["runtime_path"].as_str(), Some(SHIM));
    assert_eq!(ours["options"]["SystemdCgroup"].as_bool(), Some(true));
    // The handler must be the same if containerd's file has version 2 and its dump version 3.
    let text = super::text(&table(&dump), &table(V2), 2, &spec("affinode")).unwrap();
    let after = table(&text);
    let ours = &cri(&after).unwrap()["runtimes"]["affinode"];
    assert_eq!(ours["runtime_path"].as_str(), Some(SHIM));
}

#[test]
fn a_file_without_handlers_keeps_the_built_in() {
    let dump = table(V2);
    let text = text(&dump, &table("version = 2"), 2, &spec("affinode")).unwrap();
    let after = table(&text);
    let handlers = cri(&after).unwrap()["runtimes"].as_table().unwrap();
    assert_eq!(handlers["runc"]["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
    assert_eq!(handlers["affinode"]["options"]["SystemdCgroup"].as_bool(), Some(true));
}

/// Debian's configuration file contains no handler, but `containerd config dump` prints the
/// built-in handler `runc` with all its options, each of them empty. The text block must contain
/// `runc` with the same options.
#[test]
fn a_built_in_handler_keeps_empty_options() {
    let dump = table(&V2.replace("= true", "= false"));
    let text = text(&dump, &table("version = 2"), 2, &spec("affinode")).unwrap();
    let (before, after) = (cri(&dump).unwrap(), table(&text));
    assert_eq!(cri(&after).unwrap()["runtimes"]["runc"], before["runtimes"]["runc"]);
    assert!(cri(&after).unwrap()["runtimes"]["affinode"].get("options").is_none());
}

#[test]
fn what_cannot_be_registered_is_refused() {
    let dump = table(V2);
    assert!(matches!(text(&dump, &dump, 1, &spec("affinode")), Err(BlockError::Version(1))));
    let bare = table("version = 3");
    assert!(matches!(text(&bare, &bare, 3, &spec("affinode")), Err(BlockError::NoCri)));
}
