use super::*;

const RUNTIMES: &str = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes";

fn file(lines: &[&str]) -> String {
    lines.iter().map(|line| line.replace("RUNTIMES", RUNTIMES) + "\n").collect()
}

#[test]
fn tables_are_cut_and_all_else_stays() {
    let ours = file(&[
        "[RUNTIMES.affinode] # a handler",
        "runtime_path = '/x'",
        "pod_annotations = [",
        "  'affinode.io/*',",
        "]",
        "  [RUNTIMES.affinode.options]",
        "  SystemdCgroup = true # as runc",
    ]);
    let head = "# first\r\nversion = 3 # three\r\n\n# of the operator\n";
    let tail = file(&["", "# next", "[RUNTIMES.runc]", "runtime_type = 'r' # [x]"]);
    let text = format!("{head}{ours}{tail}");
    assert_eq!(without(&text, "affinode"), Some(format!("{head}{tail}")));
    assert_eq!(without(&text, "other"), Some(text.clone()), "the file has no handler of this name");
    let marked = format!("{head}{}{ours}{}{tail}", block::BEGIN, block::END);
    assert_eq!(without(&marked, "affinode"), Some(format!("{head}{tail}")));
}

/// A configuration file has the form that NVIDIA's toolkit writes: sorted and indented, with a
/// header for each table. The removal of the handler must leave all other values unchanged.
#[test]
fn a_sorted_tree_loses_the_handler_alone() {
    let all = include_str!("../testdata/99-nvidia-v3.toml");
    let after = without(all, "affinode").unwrap();
    let (mut before, after): (Table, Table) = (all.parse().unwrap(), after.parse().unwrap());
    let runtimes = &mut before["plugins"][PLUGINS[1]]["containerd"]["runtimes"];
    assert!(runtimes.as_table_mut().unwrap().remove("affinode").is_some());
    assert_eq!(before, after);
}

#[test]
fn any_form_of_toml_is_taken_out() {
    let forms = [
        file(&["[plugins.'io.containerd.cri.v1.runtime'.containerd]", "runtimes.affinode.a = 1", "x = 1"]),
        file(&["[RUNTIMES]", "affinode = { a = 1 }", "runc = { a = 2 }"]),
        file(&["[RUNTIMES]", "affinode.a = 1", "affinode.b = 2", "runc.a = 2"]),
        file(&["plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.affinode.a = 1", "x = 1"]),
        "plugins = { 'io.containerd.cri.v1.runtime' = { containerd = { runtimes = { affinode = { a = 1 }, runc = { a = 2 } } } } }\n".to_owned(),
        file(&["[RUNTIMES.affinode.options]", "a = 1", "[x]"]),
    ];
    for text in forms {
        let after = without(&text, "affinode").unwrap();
        let after: Table = after.parse().unwrap();
        assert!(handler::handler_of(&after, "affinode").is_none(), "{text}");
        assert_eq!(pruned(text.parse().unwrap(), "affinode"), pruned(after, "affinode"));
    }
}

#[test]
fn a_broken_file_is_left_alone() {
    assert_eq!(without("version = ", "affinode"), None);
}
