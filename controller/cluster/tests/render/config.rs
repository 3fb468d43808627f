//! Tests that the controller can parse the configuration that the chart writes for controllers.

use affinode_controller::config::Config;
use affinode_core::{explain, policy::Mode};

use super::{NEWEST, render, render_for};

/// Chart values with each key of `[policy]`. Numbers are written as in a values file.
const VALUES: &str = "
policy:
  mode: pressure
  idle_timeout: 90s
  minimum_residency: 20s
  priority: 5
  keep_alive: fixed
  wake_cost: 2m
  prewake: true
  wake_on: connection
  restore: by-annotation
  on_oom: wait
  on_oom_timeout: 30s
  no_progress_timeout: 2h
  on_no_progress: end
  engine: full
  retain_host_copy: true
  checksum: true
  dedup: true
  prefault: true
  disk_after: 2h
  allow_gpu_migration: true
  minimum_vram_mib: 1048576
  vram_limit: 64Gi
  offload_window: always
  victims: lru
  namespace:
    - name: ml
      priority: -3
      minimum_vram_mib: 2048
      prewake: false
config: |
  [memory]
  node_reserve_mib = 4096
";

#[test]
fn a_values_file_becomes_a_valid_configuration() {
    let Some(rendered) = render(VALUES) else { return };
    let text = rendered.get("ConfigMap", "affinode-config")["data"]["cluster.toml"].clone();
    let text = text.as_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cluster.toml");
    std::fs::write(&file, text).unwrap();
    // `affinode policy validate` and each node load the file in this way.
    let config = Config::load(&file).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let policy = config.policy.policy();
    assert_eq!((policy.priority, policy.minimum_vram_bytes), (5, 1 << 40));
    let ruled = config.settings().policies.before_annotations("ml");
    assert_eq!((ruled.priority, ruled.minimum_vram_bytes), (-3, 2048 << 20));
    assert_eq!(config.memory.node_reserve_mib, Some(4096));
    for name in explain::names() {
        assert!(config.origins.contains_key(name), "{name} is not in the values file");
    }
    // Earlier versions do not accept a float in place of a whole number.
    assert!(!text.contains(".0"), "{text}");
}

/// YAML reads `off` as a boolean and `0` as a number. Nodes would refuse the resulting TOML.
#[test]
fn unquoted_off_and_zero_are_refused() {
    for (key, unquoted, quoted) in
        [("mode", "off", "\"off\""), ("disk_after", "0", "\"0\""), ("vram_limit", "0", "\"0\"")]
    {
        for (before, after) in [("", ""), ("namespace: [{name: ml, ", "}]")] {
            let values = |value| format!("policy: {{{before}{key}: {value}{after}}}");
            let Some(refused) = render_for(NEWEST, &values(unquoted)) else { return };
            let Err(error) = refused else { panic!("accepted: {}", values(unquoted)) };
            assert!(
                error.contains(&format!("/{key}'")) && error.contains("want string"),
                "{error}"
            );
            let rendered = render(&values(quoted)).unwrap();
            let text = rendered.get("ConfigMap", "affinode-config")["data"]["cluster.toml"].clone();
            let text = text.as_str().unwrap();
            Config::from_toml(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        }
    }
}

#[test]
fn without_a_policy_only_the_socket_is_set() {
    let Some(rendered) = render("{}") else { return };
    let text = rendered.get("ConfigMap", "affinode-config")["data"]["cluster.toml"].clone();
    assert!(!text.as_str().unwrap().contains("[policy]"), "{text}");
}

#[test]
fn the_preset_observe_moves_nothing() {
    let preset = std::fs::read_to_string(super::chart().join("presets/observe.yaml")).unwrap();
    let Some(rendered) = render(&preset) else { return };
    let text = rendered.get("ConfigMap", "affinode-config")["data"]["cluster.toml"].clone();
    let config = Config::from_toml(text.as_str().unwrap()).unwrap();
    assert_eq!(config.policy.policy().mode, Mode::Manual);
    let policy = rendered.get("MutatingAdmissionPolicy", "affinode");
    let namespaces = policy["spec"]["matchConstraints"]["namespaceSelector"].to_string();
    assert!(namespaces.contains("enabled") && !namespaces.contains("ignore"), "{namespaces}");
    rendered.get("Lease", "affinode-rollout-0");
}
