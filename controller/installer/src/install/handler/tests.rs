use super::{super::block, *};

const V2: &str = r#"version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
"#;
/// Configuration file that NVIDIA's toolkit 1.20.1 wrote on a node with Affinode's handler. The
/// toolkit made it from the output of `containerd config dump` of containerd 2.1.9.
const V3_COPY: &str = include_str!("../testdata/99-nvidia-v3.toml");
/// Configuration file that NVIDIA's toolkit wrote like [`V3_COPY`], but for a containerd whose
/// configuration has version 2.
const V2_COPY: &str = include_str!("../testdata/99-nvidia-v2.toml");

fn table(text: &str) -> Table {
    text.parse().unwrap()
}

fn spec(name: &str, prefix: &str, cdi: bool) -> HandlerSpec {
    HandlerSpec::new(name, prefix.as_ref(), None, cdi)
}

fn judged(config: &str, cdi: bool) -> HandlerVerdict {
    spec("affinode", "/usr/local", cdi).judge(&table(config))
}

/// NVIDIA's toolkit has copied Affinode's handler into its own file, with sorted keys and without
/// quotes and comments. The copy must count as the wanted handler.
#[test]
fn a_copied_handler_is_the_same() {
    for config in [V3_COPY, V2_COPY] {
        assert_eq!(judged(config, true), HandlerVerdict::Same);
        assert_eq!(judged(config, false), HandlerVerdict::Differs, "the handler is a copy of runc");
        let default = config.replacen(
            ".containerd]\n",
            ".containerd]\ndefault_runtime_name = \"nvidia\"\n",
            1,
        );
        let default = default.replace("default_runtime_name = \"runc\"\n", "");
        assert_eq!(judged(&default, true), HandlerVerdict::Differs, "nvidia is the default");
        let changed = config.replace("[\"affinode.io/*\"]", "[]");
        assert_eq!(judged(&changed, true), HandlerVerdict::Differs);
    }
}

#[test]
fn another_program_is_foreign() {
    let other = |config: &str| judged(config, true);
    assert_eq!(
        other(&V3_COPY.replace("/usr/local/bin", "/opt/other/bin")),
        HandlerVerdict::Foreign
    );
    let path = V2_COPY.replacen("affinode.v1\"", "affinode.v1\"\nruntime_path = \"/opt/x\"", 1);
    assert_eq!(other(&path), HandlerVerdict::Foreign);
    assert_eq!(other(&V2_COPY.replace("affinode.v1", "runc.v2")), HandlerVerdict::Foreign);
    assert_eq!(other(V2), HandlerVerdict::Absent);
}

/// If containers get their devices from CDI, the model handler must be the default handler.
/// Otherwise it must be NVIDIA's handler, if the configuration contains one.
#[test]
fn the_model_is_what_pods_had_before() {
    let named = |config: &str, cdi| {
        let config = table(config);
        model(cri(&config).unwrap(), "affinode", cdi).map(|(name, _)| name.to_owned())
    };
    assert_eq!(named(V2, true).as_deref(), Some("runc"));
    assert_eq!(named(V2, false).as_deref(), Some("runc"));
    assert_eq!(named(V3_COPY, true).as_deref(), Some("runc"));
    assert_eq!(named(V3_COPY, false).as_deref(), Some("nvidia"));
    let ours = V3_COPY.replace("name = \"runc\"", "name = \"affinode\"");
    assert_eq!(named(&ours, true).as_deref(), Some("runc"), "Affinode's handler is no model");
}

/// Without NVIDIA's toolkit, runc is the model. If runc's options are changed later, Affinode's
/// handler must count as different.
#[test]
fn a_later_change_of_the_model_is_seen() {
    let block = block::text(&table(V2), &table(V2), 2, &spec("affinode", "/opt", false)).unwrap();
    let config = format!("{V2}{block}");
    let judged = |config: &str| spec("affinode", "/opt", false).judge(&table(config));
    assert_eq!(judged(&config), HandlerVerdict::Same);
    let runc = config.replacen("SystemdCgroup = true", "SystemdCgroup = false", 1);
    assert_eq!(judged(&runc), HandlerVerdict::Differs);
}

#[test]
fn a_difference_anywhere_else_is_named() {
    let (before, after) = (table(V2), table(&V2.replace("= true", "= false")));
    let differing =
        |after: &Table, name: &str| only_handlers_differ(&before, after, &[name.to_owned()]);
    let place = "plugins.io.containerd.grpc.v1.cri.containerd.runtimes.runc.options.SystemdCgroup";
    assert_eq!(differing(&after, "affinode"), Err(place.into()));
    assert_eq!(differing(&after, "runc"), Ok(()));
    let less = table("version = 2");
    assert_eq!(differing(&less, "x"), Err("plugins".into()));
}

#[test]
fn default_is_known_in_each_version() {
    assert!(is_default_handler(&table(V2), "runc") && !is_default_handler(&table(V2), "affinode"));
    let v3 = table(&V2.replace(PLUGINS[0], PLUGINS[1]).replace("version = 2", "version = 3"));
    assert!(is_default_handler(&v3, "runc") && !is_default_handler(&v3, "affinode"));
    assert!(!is_default_handler(&table("version = 3\n"), "runc"));
}
