use proptest::prelude::*;

use super::*;

fn parse(line: &str) -> OciInvocation {
    let argv: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    OciInvocation::parse(&argv)
}

fn container(id: &str, bundle: &str) -> NewContainer {
    let bundle = (!bundle.is_empty()).then(|| bundle.into());
    NewContainer { id: id.into(), bundle }
}

#[test]
fn create_as_conmon_writes_it() {
    for line in [
        "--log-format=json --log /u/oci-log create --bundle /b --pid-file /p c1",
        "--log-format json --log=/u/oci-log --systemd-cgroup create -b /b --no-pivot --pid-file /p c1",
        "-log-format=json -log /u/oci-log --debug create -b=/b --console-socket /s c1",
        "--cgroup-manager cgroupfs --log /u/oci-log --log-format json create -b/b -- c1",
        "--log-format=json --log /u/oci-log create c1 --bundle=/b --preserve-fds 2",
    ] {
        let got = parse(line);
        assert_eq!(got.command, OciCommand::Create(container("c1", "/b")), "{line}");
        let log = LogTarget { file: Some("/u/oci-log".into()), json: true };
        assert_eq!((got.log, got.root), (log, None), "{line}");
    }
}

#[test]
fn run_and_start_name_their_container() {
    let got = parse("--root /r run --detach c1");
    assert_eq!((got.root, got.log), (Some("/r".into()), LogTarget::default()));
    assert_eq!(got.command, OciCommand::Run(container("c1", "")));
    assert_eq!(parse("--root=/r start c1").command, OciCommand::Start { id: "c1".into() });
}

#[test]
fn log_is_written_to_files_alone() {
    let file = |value: &str| parse(&format!("--log={value} start c1")).log.file;
    assert_eq!(file("file:/u/log"), Some("/u/log".into()));
    assert_eq!(file("/u/log:1"), Some("/u/log:1".into()));
    for elsewhere in ["journald:affinode", "syslog:x", "file:", ""] {
        assert_eq!(file(elsewhere), None, "{elsewhere}");
    }
}

/// Command lines that create no container must be passed on unchanged, although some of their words
/// are commands of the runtime.
#[test]
fn all_other_commands_pass_unseen() {
    for line in [
        "",
        "--version",
        "-v",
        "features",
        "create",
        "create --bundle",
        "start",
        "delete --force c1",
        "kill --all c1 KILL",
        "exec --process /p c1 run c2",
        "state create",
        "--root",
        "--root create start c1 --x",
        "restore --bundle /b c1",
        // The command names another file than the bundle's config.json as the spec.
        "create --config /other.json --bundle /b c1",
        "run -f /other.json c1",
    ] {
        let got = parse(line).command;
        let wanted = match line {
            "--root create start c1 --x" => OciCommand::Start { id: "c1".into() },
            _ => OciCommand::Other,
        };
        assert_eq!(got, wanted, "{line}");
    }
    use std::os::unix::ffi::OsStringExt;
    let bytes = OsString::from_vec(vec![0xff]);
    assert_eq!(OciInvocation::parse(&["create".into(), bytes]), OciInvocation::default());
}

#[test]
fn words_of_a_command_are_kept() {
    assert_eq!(parse("kill --all c1 KILL").words, ["c1", "KILL"]);
    assert_eq!(parse("exec --pid-file /p --process /q --detach c1").words, ["/q", "c1"]);
}

proptest! {
    #[test]
    fn any_line_is_parsed(words in proptest::collection::vec("-{0,3}[a-zé=/]{0,8}", 0..12)) {
        let argv: Vec<OsString> = words.into_iter().map(OsString::from).collect();
        let _ = OciInvocation::parse(&argv);
    }
}
