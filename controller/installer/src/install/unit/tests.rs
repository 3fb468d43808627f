use std::{fs, path::Path, time::Duration};

use affinode_proto::installation::PathsFile;

use super::{change::UnitPlan, record::UnitRecord, *};
use crate::install::{DockerRequest, RestartRequest};

/// Options of an installation whose record and unit are below a temporary folder. The programs'
/// folder is /opt/affinode.
fn options(folder: &Path) -> InstallOptions {
    InstallOptions {
        containerd: None,
        prefix: "/opt/affinode".into(),
        folders: PathsFile::default(),
        state_dir: folder.to_owned(),
        runtime_name: "affinode".into(),
        restart: RestartRequest::None,
        docker: DockerRequest::Never,
        podman: crate::install::PodmanRequest::Never,
        unit: UnitRequest::Required(folder.join("units")),
        drain: Duration::ZERO,
        dry_run: false,
    }
}

/// Creates the record and the file of a unit with this text. The record states that the unit was
/// started.
fn settled(folder: &Path, text: &str) -> UnitRecord {
    let path = folder.join("units").join(format!("{UNIT}.service"));
    let record = UnitRecord::new(path, String::new()).with(text.into(), true);
    fs::create_dir_all(folder.join("units")).unwrap();
    fs::write(&record.path, text).unwrap();
    record.write(folder).unwrap();
    record
}

fn wanted(folder: &Path) -> String {
    match UnitPlan::of(&options(folder), false).unwrap() {
        UnitPlan::Start(record) => record.text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn another_record_folder_gets_no_unit() {
    let folder = tempfile::tempdir().unwrap();
    for unit in [UnitRequest::Detected, UnitRequest::Never] {
        let options = InstallOptions { unit, ..options(folder.path()) };
        assert_eq!(UnitPlan::of(&options, false).unwrap(), UnitPlan::LeftOut);
    }
}

#[test]
fn a_settled_unit_is_not_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let text = wanted(folder.path());
    let record = settled(folder.path(), &text);
    // The unit does not run here, because an operator stopped it. The installation must not start
    // it.
    for new_program in [false, true] {
        let plan = UnitPlan::of(&options(folder.path()), new_program).unwrap();
        assert_eq!(plan, UnitPlan::LeftOut);
    }
    record.with(text.clone(), false).write(folder.path()).unwrap();
    let plan = UnitPlan::of(&options(folder.path()), false).unwrap();
    assert_eq!(
        plan,
        UnitPlan::Start(record.with(text, false)),
        "the installer was killed before the unit was settled"
    );
}

#[test]
fn only_an_unchanged_unit_is_updated() {
    let folder = tempfile::tempdir().unwrap();
    let text = wanted(folder.path());
    let record = settled(folder.path(), "of an earlier version");
    let plan = || UnitPlan::of(&options(folder.path()), false).unwrap();
    let record = record.with(text, true);
    assert_eq!(plan(), UnitPlan::Update { record: record.clone(), main_pid: None });
    fs::write(&record.path, "of an operator").unwrap();
    assert_eq!(plan(), UnitPlan::LeftOut);
    let removal = UnitPlan::of_removal(folder.path()).unwrap();
    assert!(matches!(removal, UnitPlan::Remove { unchanged: false, .. }), "{removal:?}");
}

#[test]
fn a_masked_unit_is_another_ones() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("units")).unwrap();
    let path = folder.path().join("units").join(format!("{UNIT}.service"));
    std::os::unix::fs::symlink("/dev/null", path).unwrap();
    let plan = UnitPlan::of(&options(folder.path()), false);
    assert!(matches!(plan, Err(UnitError::Taken(_))), "{plan:?}");
}

#[test]
fn a_unit_record_of_a_newer_release_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let record = settled(folder.path(), "text");
    let path = UnitRecord::file(folder.path());
    let text = fs::read_to_string(&path).unwrap().replacen('{', "{\"new\": [1],", 1);
    fs::write(&path, &text).unwrap();
    assert_eq!(UnitRecord::read(folder.path()).unwrap(), Some(record));
    fs::write(&path, text.replace("\"version\": 1", "\"version\": 2")).unwrap();
    assert!(UnitRecord::read(folder.path()).is_err());
}
