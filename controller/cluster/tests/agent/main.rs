//! Tests the program `affinode-cluster node` with a simulated API server in memory. A script in
//! place of the command `affinode` simulates the node.

#![allow(clippy::unwrap_used)] // Helpers of tests.

mod api;
mod controller;
mod device_plugin;
mod dra;
mod gpu_sharing;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use api::{ApiServer, NODE};
use serde_json::{Value, json};

const RUNTIME: &str = "affinode.io/runtime";
const EXCLUDE: &str = "affinode.io/exclude";
const OFFER_GPUS: &str = "affinode.io/offer-gpus";
const GPUS_IDLE: &str = "affinode.io/gpus-idle";
const GPUS_IDLE_SINCE: &str = "affinode.io/gpus-idle-since";
const RETIRE: &str = "affinode.io/retire";
const RETIRE_UNTIL: &str = "affinode.io/retire-until";
const STATE: &str = "affinode.io/state";
const CERTIFICATE: &str = "affinode.io/certificate-sha256";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/system/leases/slot";

/// The script that simulates the node. It reads files, each of which exists while its condition is
/// true:
///
/// - `served`: containerd serves the runtime.
/// - `outdated`, `missing`: the installed handler is outdated or missing.
/// - `lost`: the unit is missing.
/// - `failing`: the controller of the unit fails at each start.
/// - `due`: an installation has steps to run, none of which restarts containerd.
/// - `broken`: an installation fails.
/// - `unwritable`: an installation fails before it restarts anything.
/// - `managed`: another program writes containerd's file anew.
/// - `unreadable`: the record of the installation cannot be read.
/// - `unit`: the unit that runs containerd. An installation restarts it.
/// - `shims`: the number of running pods of the runtime.
/// - `gpus`: the driver is loaded. The file contains its GPUs.
const AFFINODE: &str = r#"#!/bin/sh
cd "$(dirname "$0")/../node" || exit 9
echo "$@" >> calls
case "$*" in
  status*) if [ -e lost ]; then unit=missing; else unit=running; fi
           if [ -e failing ]; then unit=failing; fi
           if [ -e unreadable ]; then echo "no valid record" >&2; exit 1; fi
           if [ ! -e served ]; then echo null; exit 1; fi
           if [ -e outdated ]; then state=outdated; else state=served; fi
           if [ -e missing ]; then state=missing; fi
           shims=$(cat shims 2>/dev/null || echo 0)
           echo '{"handler":{"state":"'$state'"},"files":[],"running_shims":'$shims',"unit":{"state":"'$unit'"}}' ;;
  "policy validate"*) if grep -q wrong "$3"; then echo "policy.mode: wrong" >&2; exit 1; fi ;;
  install*--dry-run*) if [ -e unit ]; then step="systemctl restart $(cat unit)"
                      elif [ -e due ]; then step="a step"
                      else step="restart containerd by hand"; fi
                      if [ -e due ] || [ -e missing ] || [ -e outdated ] || [ ! -e served ]
                      then echo '["'$step'"]'; else echo '[]'; fi ;;
  install*) if [ -e unwritable ]; then echo "containerd was not restarted: no space" >&2; exit 1; fi
            if [ -e broken ]; then echo "no space left" >&2; exit 1; fi
            if [ -e managed ]; then echo "but another program wrote config.toml" >&2; exit 1; fi
            rm -f due lost missing outdated; touch served; echo '["a step"]' ;;
  gpus*) if [ -e gpus ]; then cat gpus; else echo "NVML cannot be used" >&2; exit 1; fi ;;
  uninstall*) rm -f served ;;
esac
"#;

struct Agent {
    child: Child,
    api: ApiServer,
    folder: PathBuf,
    options: Vec<String>,
    /// Older processes of the agent, which may still run.
    older: Vec<Child>,
    _dir: tempfile::TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        for child in self.older.iter_mut().chain([&mut self.child]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Agent {
    fn start(labels: Value, files: &[&str], more: &[&str]) -> Agent {
        Agent::with(ApiServer::start(labels), files, more, |_| {})
    }

    fn with(api: ApiServer, files: &[&str], more: &[&str], prepare: impl Fn(&Path)) -> Agent {
        // The folder is on the file system of the build, so that the program can be hard-linked
        // into it.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let folder = dir.path().to_owned();
        for name in ["bin", "node", "root"] {
            fs::create_dir(folder.join(name)).unwrap();
        }
        fs::hard_link(env!("CARGO_BIN_EXE_affinode-cluster"), folder.join("bin/affinode-cluster"))
            .unwrap();
        let script = folder.join("bin/affinode");
        fs::write(&script, AFFINODE).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        for name in files {
            fs::write(folder.join("node").join(name), "").unwrap();
        }
        fs::write(folder.join("cluster.toml"), "[policy]\n").unwrap();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c", "cluster": { "server": format!("http://{}", api.address) } }],
            "users": [{ "name": "u", "user": {} }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        });
        fs::write(folder.join("kubeconfig"), config.to_string()).unwrap();
        prepare(&folder);
        let options: Vec<String> = more
            .iter()
            .map(|option| option.replace("DIR", &folder.display().to_string()))
            .collect();
        let child = spawn(&folder, &options);
        Agent { child, api, folder, options, older: Vec::new(), _dir: dir }
    }

    /// Starts a newer process of the agent for the same node. The older process goes on.
    fn start_newer(&mut self) {
        let newer = spawn(&self.folder, &self.options);
        self.older.push(std::mem::replace(&mut self.child, newer));
    }

    fn until_state(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        self.api.until(what, |api| is_so(&api.annotation(STATE)));
    }

    fn has(&self, file: &str) -> bool {
        self.folder.join("node").join(file).exists()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.folder.join("node/calls")).unwrap_or_default()
    }
}

/// Starts the program for the node whose files are in a folder.
fn spawn(folder: &Path, options: &[String]) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).unwrap();
    Command::new(folder.join("bin/affinode-cluster"))
        .args(["node", "--node-name=one", "--installation=system/affinode"])
        .args(["--listen=127.0.0.1:0", "--restart-mode=none"])
        .arg(format!("--host-root={}", folder.join("root").display()))
        .arg(format!("--config={}", folder.join("cluster.toml").display()))
        .args(options)
        .env("KUBECONFIG", folder.join("kubeconfig"))
        // The agent needs this variable for reviews of tokens. No test requests a review.
        .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        .env("KUBERNETES_SERVICE_PORT", "1")
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

#[test]
fn a_label_removes_affinode_from_one_node() {
    let agent = Agent::start(json!({}), &[], &[]);
    agent.api.until("the label of a served runtime", |api| api.label(RUNTIME) == "true");
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: "true" } } }));
    agent.until_state("the exclusion", |state| state.starts_with("excluded"));
    assert!(agent.api.label(RUNTIME).is_null(), "no further pod comes to it");
    assert!(!agent.has("served"), "{}", agent.calls());
    agent.api.patch(NODE, &json!({ "metadata": { "labels": { EXCLUDE: null } } }));
    agent.api.until("the installation", |api| api.label(RUNTIME) == "true");
    assert!(agent.has("served"));
}

/// The uninstaller was killed, so it does not withdraw its request. The agent must follow the
/// request only until its time limit, and then serve the runtime again.
#[test]
fn expired_removal_request_is_cleared() {
    let agent = Agent::start(json!({ RUNTIME: "true" }), &["served"], &[]);
    let request = |until: &str| {
        let annotations = json!({ RETIRE: "system/affinode now", RETIRE_UNTIL: until });
        json!({ "metadata": { "annotations": annotations } })
    };
    agent.api.patch(NODE, &request("2999-01-01T00:00:00Z"));
    agent.until_state("the removal", |state| state == "retired");
    assert!(agent.api.label(RUNTIME).is_null(), "no further pod comes to it");
    agent.api.patch(NODE, &request("2020-01-01T00:00:00Z"));
    agent.api.until("the installation", |api| api.label(RUNTIME) == "true");
    agent.until_state("the installation", |state| state == "served");
    let left = [RETIRE, RETIRE_UNTIL].map(|name| agent.api.annotation(name));
    assert_eq!(left, [const { String::new() }; 2]);
}

/// An earlier agent has set the label of idle GPUs. The node has no controller, so that nothing is
/// known about its GPUs, and the agent must remove the label.
#[test]
fn label_of_idle_gpus_needs_a_controller() {
    let agent = Agent::start(json!({ GPUS_IDLE: "true" }), &[], &[]);
    let since =
        json!({ "metadata": { "annotations": { GPUS_IDLE_SINCE: "2026-11-27T01:02:03Z" } } });
    agent.api.patch(NODE, &since);
    agent.api.until("the removal of the label", |api| api.label(GPUS_IDLE).is_null());
    assert_eq!(agent.api.annotation(GPUS_IDLE_SINCE), "");
}

/// The record of the installation cannot be read. The agent must not report that Affinode was
/// removed, because containerd still serves it.
#[test]
fn an_unreadable_record_is_not_a_removal() {
    let agent = Agent::start(json!({ EXCLUDE: "true" }), &["served", "unreadable"], &[]);
    agent.until_state("the reason", |state| !state.is_empty());
    let state = agent.api.annotation(STATE);
    assert!(state.contains("no valid record"), "{state}");
    assert!(agent.has("served"));
}

#[test]
fn an_excluded_node_is_never_installed() {
    let agent = Agent::start(json!({ EXCLUDE: "true" }), &[], &[]);
    agent.until_state("the exclusion", |state| state.starts_with("excluded"));
    assert!(!agent.calls().contains("install"), "{}", agent.calls());
}

#[test]
fn a_failed_upgrade_keeps_the_label() {
    let agent = Agent::start(json!({ RUNTIME: "true" }), &["served", "due", "broken"], &[]);
    agent.until_state("the failure", |state| {
        state.starts_with("served, but this version is not completely installed")
    });
    assert!(agent.api.annotation(STATE).contains("no space left"));
    assert_eq!(agent.api.label(RUNTIME), "true", "pods still come to it");
}

/// Another program writes containerd's file anew at each restart. A further restart has no effect,
/// so the agent must not repeat it until something has changed. The node must keep its slot
/// meanwhile, so that the roll-out stops.
#[test]
fn a_lost_edit_is_not_repeated() {
    let api = ApiServer::start(json!({}));
    api.put(LEASE, lease(Value::Null));
    let agent = Agent::with(api, &["managed"], &["--rollout-lease=slot"], |_| {});
    agent.until_state("the failure", |state| state.contains("another program wrote"));
    let attempts = || {
        let calls = agent.calls();
        calls.lines().filter(|call| call.starts_with("install") && !call.contains("dry")).count()
    };
    let plans = || agent.calls().matches("--dry-run").count();
    // Each change of the node object makes the agent check the node at once.
    let look = |value: &str| {
        let before = plans();
        let wish = json!({ "metadata": { "annotations": { RETIRE: value } } });
        agent.api.patch(NODE, &wish);
        agent.api.until("a further check", |_| plans() > before);
    };
    let renewed = || agent.api.get(LEASE)["spec"]["renewTime"].clone();
    let first = renewed();
    look("a");
    look("b");
    assert_eq!(attempts(), 1);
    agent.api.until("the renewal of the slot", |_| renewed() != first);
    fs::write(agent.folder.join("node/unit"), "containerd").unwrap();
    look("c");
    agent.api.until("an attempt with other steps", |_| attempts() == 2);
}

#[test]
fn a_failed_installation_has_no_label() {
    let agent = Agent::start(json!({ RUNTIME: "true" }), &["broken"], &[]);
    agent.until_state("the failure", |state| state.starts_with("not installed"));
    assert!(agent.api.label(RUNTIME).is_null());
}

/// k3s and others run the kubelet in the unit that an installation restarts. A starting kubelet
/// ends pods whose node selector names a label that the node lacks. So the node must have the label
/// during the restart if such pods run, also after a failed installation.
#[test]
fn label_stays_while_the_kubelet_restarts() {
    let on = json!({ RUNTIME: "true" });
    // (label at first, state of the handler, running pods, unit, whether the label is ever off)
    let cases = [
        (&on, "outdated", "0", "k3s", false),
        (&on, "missing", "1", "rke2-agent", false),
        (&on, "outdated", "1", "containerd", true),
        (&json!({}), "missing", "1", "k0sworker", true),
    ];
    for (labels, state, shims, unit, lacks) in cases {
        let prepare = |folder: &Path| {
            fs::write(folder.join("node/unit"), unit).unwrap();
            fs::write(folder.join("node/shims"), shims).unwrap();
        };
        let api = ApiServer::start(labels.clone());
        let agent = Agent::with(api, &["served", state], &[], prepare);
        agent.until_state("the installation", |state| state == "served");
        assert_eq!(agent.api.lacked(RUNTIME), lacks, "{unit}: {}", agent.calls());
        assert_eq!(agent.api.label(RUNTIME), "true");
    }
    let prepare = |folder: &Path| {
        fs::write(folder.join("node/unit"), "k3s").unwrap();
        fs::write(folder.join("node/shims"), "2").unwrap();
    };
    for (failure, label) in [("broken", json!("true")), ("unwritable", Value::Null)] {
        let files = ["served", "missing", failure];
        // An earlier attempt has removed the label.
        let agent = Agent::with(ApiServer::start(json!({})), &files, &[], prepare);
        agent.until_state("the failure", |state| state.starts_with("not installed"));
        assert_eq!(agent.api.label(RUNTIME), label, "a kubelet may be starting: {failure}");
    }
}

fn lease(holder: Value) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": "slot", "namespace": "system" },
        "spec": { "holderIdentity": holder, "renewTime": "2999-01-01T00:00:00.000000Z" },
    })
}

/// The original of the handler can change on all nodes at once. The nodes must then not restart
/// containerd all at once.
#[test]
fn an_outdated_node_waits_for_a_slot() {
    let api = ApiServer::start(json!({ RUNTIME: "true" }));
    api.put(LEASE, lease("another".into()));
    let agent = Agent::with(api, &["served", "outdated"], &["--rollout-lease=slot"], |_| {});
    agent.until_state("the wait", |state| state.starts_with("served; "));
    assert!(agent.api.annotation(STATE).contains("waits for its turn"));
    assert!(agent.has("outdated"), "{}", agent.calls());
    assert!(!agent.api.lacked(RUNTIME), "containerd still serves the earlier handler");
    agent.api.put(LEASE, lease(Value::Null));
    agent.api.until("the installation", |_| !agent.has("outdated"));
}

/// Another node has the slot. A node that lost its systemd unit needs no restart of containerd, so
/// it must not wait for the slot.
#[test]
fn a_repair_without_a_restart_needs_no_slot() {
    let api = ApiServer::start(json!({ RUNTIME: "true" }));
    api.put(LEASE, lease("another".into()));
    let agent = Agent::with(api, &["served", "due", "lost"], &["--rollout-lease=slot"], |_| {});
    agent.until_state("the installation", |state| state == "served");
    assert!(!agent.has("lost"), "{}", agent.calls());
}

#[test]
fn a_node_without_a_slot_is_not_touched() {
    let api = ApiServer::start(json!({}));
    api.put(LEASE, lease("another".into()));
    let agent = Agent::with(api, &[], &["--rollout-lease=slot"], |_| {});
    agent.until_state("the wait", |state| state.starts_with("waits"));
    assert!(
        agent
            .calls()
            .lines()
            .all(|call| !call.starts_with("install") || call.contains("--dry-run"))
    );
    agent.api.put(LEASE, lease(Value::Null));
    agent.api.until("the installation", |api| api.label(RUNTIME) == "true");
    let holder = &agent.api.get(LEASE)["spec"]["holderIdentity"];
    assert!(holder.is_null(), "the slot is free for the next node: {holder}");
}

/// The agent must install the systemd unit that keeps a controller running. It must not install the
/// unit if the chart disables this, or sets other folders than the default folders.
#[test]
fn a_unit_needs_the_usual_folders() {
    for (option, without) in [
        ("--run-dir=/run/affinode", false),
        ("--controller-unit=false", true),
        ("--run-dir=/run/lab", true),
        ("--config-dir=/etc/lab", true),
    ] {
        let agent = Agent::start(json!({}), &[], &[option]);
        agent.api.until("the installation", |api| api.label(RUNTIME) == "true");
        let calls = agent.calls();
        let installs = calls.lines().filter(|call| call.starts_with("install"));
        let told: Vec<bool> = installs.map(|call| call.contains("--no-controller-unit")).collect();
        assert!(!told.is_empty() && told.iter().all(|one| *one == without), "{option}: {calls}");
    }
}

/// A node loses the systemd unit, as at a reboot that empties /etc. The agent must install the unit
/// again.
#[test]
fn a_lost_unit_is_installed_again() {
    let agent = Agent::start(json!({}), &["served", "due", "lost"], &[]);
    agent.until_state("the installation", |state| state == "served");
    assert!(!agent.has("due"), "{}", agent.calls());
    fs::write(agent.folder.join("node/lost"), "").unwrap();
    fs::write(agent.folder.join("node/due"), "").unwrap();
    // A change of the node object makes the agent check the node at once.
    agent.api.patch(NODE, &json!({ "metadata": { "annotations": { "affinode.io/retire": "x" } } }));
    agent.api.until("the unit", |_| !agent.has("due"));
}

#[test]
fn a_controller_that_does_not_start_is_shown() {
    let agent = Agent::start(json!({ RUNTIME: "true" }), &["served", "failing"], &[]);
    agent.until_state("the failure", |state| state.contains("no controller runs"));
    assert_eq!(agent.api.label(RUNTIME), "true", "containerd still serves the runtime");
    assert!(agent.calls().lines().all(|call| !call.starts_with("install") || call.contains("dry")));
}

#[test]
fn a_refused_configuration_is_an_event() {
    let prepare = |folder: &Path| fs::write(folder.join("cluster.toml"), "wrong\n").unwrap();
    let agent = Agent::with(ApiServer::start(json!({})), &["served"], &[], prepare);
    agent.until_state("the refusal", |state| state.contains("policy.mode: wrong"));
    agent.api.until("the event", |api| !api.created().is_empty());
    let events = agent.api.created();
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0]["reason"], "AffinodeConfigurationRefused");
    assert_eq!(events[0]["regarding"]["kind"], "Node");
    assert!(events[0]["note"].as_str().unwrap().contains("policy.mode"), "{events:?}");
    assert_eq!(agent.api.label(RUNTIME), "true", "the node goes on with what it had");
}

#[test]
fn a_renewed_certificate_is_published() {
    let renew = |folder: &Path| {
        let made = rcgen::generate_simple_self_signed(["one".to_owned()]).unwrap();
        fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
        fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
    };
    let files = ["--tls-cert-file=DIR/tls.crt", "--tls-key-file=DIR/tls.key"];
    let agent = Agent::with(ApiServer::start(json!({})), &["served"], &files, renew);
    agent.api.until("a certificate", |api| !api.annotation(CERTIFICATE).is_empty());
    let first = agent.api.annotation(CERTIFICATE);
    renew(&agent.folder);
    agent.api.until("the renewed certificate", |api| api.annotation(CERTIFICATE) != first);
}
