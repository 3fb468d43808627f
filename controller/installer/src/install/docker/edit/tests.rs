use super::*;

const NAME: &str = "affinode";

fn keys(text: &str) -> Vec<String> {
    let file = read(text).unwrap();
    file.as_object().unwrap().keys().cloned().collect()
}

/// Examples of the content of dockerd's file, before the runtime is added. The second value is true
/// if an addition and a removal of the runtime must restore every byte of the content.
const FILES: [(&str, bool); 7] = [
    ("{}", true),
    ("{\n    \"debug\": true,\n    \"log-opts\": {\"max-size\": \"10m\"}\n}\n", true),
    (
        "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\n\t\t\t\"path\": \"x\"\n\t\t}\n\t},\n\t\"mtu\": 1e3\n}",
        true,
    ),
    ("\u{feff}{\"zeta\": 1, \"alpha\": [1,  2]}\n", false),
    ("{\"runtimes\":{\"nvidia\":{\"args\":[],\"path\":\"nvidia-container-runtime\"}}}", false),
    ("{ \"runtimes\": {} }\r\n", false),
    ("", false),
];

#[test]
fn runtime_is_added_and_other_keys_stay() {
    for (before, exact) in FILES {
        assert_eq!(entry(before, NAME), Ok(RuntimeEntry::Absent), "{before}");
        let after = with_runtime(before, NAME).unwrap();
        assert_eq!(entry(&after, NAME), Ok(RuntimeEntry::Affinode), "{after}");
        assert_eq!(after.starts_with('\u{feff}'), before.starts_with('\u{feff}'));
        let mut known = keys(before);
        if !known.iter().any(|key| key == RUNTIMES) {
            known.push(RUNTIMES.into());
        }
        assert_eq!(keys(&after), known, "the keys are not in the order of {before}");
        let list = with_list_only(&after, NAME).unwrap();
        assert!(read(&list).unwrap()[RUNTIMES].get(NAME).is_none(), "{list}");
        assert!(read(&list).unwrap()[RUNTIMES].is_object(), "{list}");
        let back = without_runtime(&after, NAME).unwrap();
        assert_eq!(entry(&back, NAME), Ok(RuntimeEntry::Absent), "{back}");
        if exact {
            assert_eq!(back, before);
        }
        let mut without = read(before).unwrap();
        // dockerd treats an empty list `runtimes` like a missing one, so the comparison ignores it.
        if without[RUNTIMES].as_object().is_some_and(serde_json::Map::is_empty) {
            without.as_object_mut().unwrap().shift_remove(RUNTIMES);
        }
        assert_eq!(read(&back).unwrap(), without.clone(), "{before}");
    }
}

#[test]
fn edited_text_keeps_indentation_and_numbers() {
    let after = with_runtime(FILES[2].0, NAME).unwrap();
    let wanted = "{\n\t\"runtimes\": {\n\t\t\"nvidia\": {\n\t\t\t\"path\": \"x\"\n\t\t},\n\t\t\"affinode\": \
                  {\n\t\t\t\"runtimeType\": \"io.containerd.affinode.v1\"\n\t\t}\n\t},\n\t\"mtu\": 1e3\n}";
    assert_eq!(after, wanted);
}

#[test]
fn another_runtime_of_the_name_is_noticed() {
    let other = |entry: &str| format!("{{\"runtimes\": {{\"affinode\": {entry}}}}}");
    for (text, wanted) in [
        (other("{\"path\": \"/usr/bin/runc\"}"), RuntimeEntry::Other),
        (other("{\"runtimeType\": \"io.containerd.runc.v2\"}"), RuntimeEntry::Other),
        (
            other("{\"runtimeType\": \"io.containerd.affinode.v1\", \"options\": {}}"),
            RuntimeEntry::Affinode,
        ),
        (other("null"), RuntimeEntry::Other),
        ("{\"runtimes\": null}".into(), RuntimeEntry::Absent),
    ] {
        assert_eq!(entry(&text, NAME), Ok(wanted), "{text}");
    }
}

#[test]
fn text_that_dockerd_refuses_is_not_edited() {
    for text in [
        "{\"debug\": true,}",
        "{ // why\n}",
        "{debug: true}",
        "[1]",
        "7",
        "{\"runtimes\": []}",
        "{} {}",
    ] {
        assert!(with_runtime(text, NAME).is_err(), "{text}");
    }
}

#[test]
fn default_runtime_is_known() {
    assert!(is_default("{\"default-runtime\": \"affinode\"}", NAME));
    assert!(!is_default("{\"default-runtime\": \"nvidia\"}", NAME) && !is_default("{}", NAME));
    assert!(is_empty("{ }\n") && is_empty(" \n") && !is_empty("{\"a\": 1}") && !is_empty("{"));
}
