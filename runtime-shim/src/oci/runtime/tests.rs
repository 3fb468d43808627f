use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;

fn program(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn crun_comes_before_runc() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let folders = [one.path().to_owned(), two.path().to_owned()];
    assert!(installed(&folders, None).is_empty());
    let runc = program(one.path(), "runc");
    let crun = program(two.path(), "crun");
    let found = |own| installed(&folders, own).into_iter().map(|it| it.path).collect::<Vec<_>>();
    assert_eq!(found(None), [crun.clone(), runc.clone()]);
    // If the program itself has the name of a runtime, it must not find itself.
    std::os::unix::fs::symlink(&crun, one.path().join("crun")).unwrap();
    assert_eq!(found(Some(&crun)), [runc]);
}

#[test]
fn configured_runtime_is_a_name_or_a_path() {
    let dir = tempfile::tempdir().unwrap();
    let folders = [dir.path().to_owned()];
    let youki = program(dir.path(), "youki");
    for configured in [Path::new("youki"), &youki] {
        assert_eq!(named(configured, &folders, None).unwrap().path, youki);
    }
    let missing = named(Path::new("none"), &folders, None).unwrap_err();
    assert!(matches!(missing, RuntimeError::NotAProgram(_)), "{missing}");
    let own = named(Path::new("youki"), &folders, Some(&youki)).unwrap_err();
    assert!(matches!(own, RuntimeError::Ourselves(_)), "{own}");
}

#[test]
fn container_belongs_to_its_creator() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = |name: &str| OciRuntime { path: dir.path().join(name) };
    let has = |name: &str, root: Option<&Path>| {
        let ids = ["c1".to_owned(), "../c1".to_owned()];
        runtime(name).has_any(&ids, root, [dir.path().to_owned()].iter())
    };
    fs::create_dir_all(dir.path().join("runc/c1")).unwrap();
    assert!(!has("runc", None), "an empty folder is no container");
    fs::write(dir.path().join("runc/c1/state.json"), "{}").unwrap();
    assert!(has("runc", None) && !has("crun", None));
    // If the command line names a state folder (`--root`), both runtimes use that same folder.
    let root = dir.path().join("runc");
    assert!(has("runc", Some(&root)) && !has("crun", Some(&root)));
    fs::write(root.join("c1/status"), "{}").unwrap();
    assert!(has("crun", Some(&root)));
    assert!(!has("youki", Some(&root)));
}

#[test]
fn container_can_be_ended_with_a_bad_setting() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("c1")).unwrap();
    fs::write(root.path().join("c1/state.json"), "{}").unwrap();
    let runc = OciRuntime { path: "/usr/bin/runc".into() };
    let choose = |line: &str| {
        let root = format!("--root={} {line}", root.path().display());
        let argv: Vec<OsString> = root.split_whitespace().map(OsString::from).collect();
        let bad = Err(RuntimeError::NotAProgram("/no/runtime".into()));
        choose(bad, std::slice::from_ref(&runc), &OciInvocation::parse(&argv))
    };
    assert_eq!(choose("kill c1 KILL").unwrap(), runc);
    assert_eq!(choose("delete --force c1").unwrap(), runc);
    // If the configured runtime is wrong, a command that concerns no existing container must fail.
    // Otherwise a new container would get another runtime than the configured runtime.
    for line in ["create c1", "run c2", "kill c2", "features"] {
        assert!(choose(line).is_err(), "{line}");
    }
}

#[test]
fn usual_folders_follow_those_of_path() {
    let found = folders(Some("/opt/bin:relative".into()));
    assert_eq!(found[0], Path::new("/opt/bin"));
    assert!(found.contains(&PathBuf::from("/usr/bin")) && !found.contains(&"relative".into()));
    assert!(!folders(None).is_empty());
}
