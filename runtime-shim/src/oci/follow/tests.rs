use super::*;

#[test]
fn other_lines_are_for_the_runtime() {
    for line in ["create c1", "start c1", "affinode-follow", "--version"] {
        let argv: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        assert!(main(&argv).is_none(), "{line}");
    }
}

fn order(
    step: FollowedStep,
    script: &str,
    process: (i32, u64),
) -> (tempfile::TempDir, PassedOrder) {
    let dir = tempfile::tempdir().unwrap();
    let (text, runtime) = (dir.path().join("text"), dir.path().join("runtime"));
    std::fs::write(&text, format!("#!/bin/sh\n{script}\n")).unwrap();
    // The file is copied by `install`, in another process. If this process wrote the file, a child
    // that another test forks could hold it open for writing, and the kernel would not execute it
    // (ETXTBSY).
    let copied = Command::new("install").args(["-m", "755"]).arg(&text).arg(&runtime).status();
    assert!(copied.unwrap().success());
    let (key, id, root) = (String::new(), "c1".to_owned(), Some(dir.path().to_owned()));
    (dir, PassedOrder { key, id, runtime, root, step, process, stays: false })
}

#[test]
fn first_process_is_what_the_runtime_says() {
    let own = i32::try_from(std::process::id()).unwrap();
    let ticks = start_ticks(own).unwrap();
    let script = format!("[ \"$1 $3 $4\" = '--root state c1' ] && echo '{{\"pid\": {own}}}'");
    // The process that the runtime replaced has ended.
    for step in [FollowedStep::Start, FollowedStep::Create, FollowedStep::Run] {
        let (_dir, order) = order(step, &script, (own, ticks + 1));
        let found = wait_for_init(&order).unwrap();
        assert_eq!(found, Some((u32::try_from(own).unwrap(), ticks)), "{step:?}");
    }
}

#[test]
fn container_that_was_not_created_is_none() {
    let own = i32::try_from(std::process::id()).unwrap();
    for script in ["exit 1", "echo '{\"pid\": 0, \"status\": \"stopped\"}'"] {
        for step in [FollowedStep::Start, FollowedStep::Create, FollowedStep::Run] {
            let (_dir, order) = order(step, script, (own, 1));
            assert_eq!(wait_for_init(&order).unwrap(), None, "{step:?}");
        }
    }
}
