use serde_json::json;

use super::*;

const ID: &str = "5f2a0000000000000000000000000000000000000000000000000000000000e1";

/// Creates dockerd's data folder with the file of one container, and a spec that mounts files of
/// that folder.
fn container(content: &Value) -> (tempfile::TempDir, Value) {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join(CONTAINERS).join(ID);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(FILE), content.to_string()).unwrap();
    let spec = mounting(&folder);
    (root, spec)
}

fn mounting(folder: &Path) -> Value {
    json!({"mounts": [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/etc/hosts", "type": "bind", "source": folder.join("hosts")}
    ]})
}

#[test]
fn name_image_and_project_are_read() {
    let plain = json!({"ID": ID, "Name": "/trainer", "Config": {"Image": "pytorch/pytorch:2", "Labels": null}});
    let (_root, spec) = container(&plain);
    let wanted = DockerNames { container: "trainer".into(), image: "pytorch/pytorch:2".into() };
    assert_eq!(names(ID, &spec).unwrap(), wanted);
    let labels = json!({"com.docker.compose.project": "shop", "com.docker.compose.service": "web"});
    let (_root, spec) = container(&json!({"Name": "/shop-web-1", "Config": {"Labels": labels}}));
    assert_eq!(names(ID, &spec).unwrap().container, "shop/shop-web-1");
}

#[test]
fn network_of_another_container_names_the_folder() {
    let (root, _) = container(&json!({"Name": "/second"}));
    let other = root.path().join(CONTAINERS).join("ab".repeat(32));
    assert_eq!(names(ID, &mounting(&other)).unwrap().container, "second");
}

#[test]
fn foreign_mounts_name_no_folder() {
    let usual = Path::new(DATA_ROOT).join(CONTAINERS);
    for source in ["/tmp/hosts", "/tmp/containers/short/hosts", "containers/x/hosts", "/hosts"] {
        let spec = json!({"mounts": [{"destination": "/etc/hosts", "source": source}]});
        assert_eq!(containers_folder(&spec), usual, "{source}");
    }
    let elsewhere = mounting(&Path::new("/data/docker/other").join(ID));
    assert_eq!(containers_folder(&elsewhere), usual);
    for spec in [json!({}), json!({"mounts": 1}), json!({"mounts": [1, {}]})] {
        assert_eq!(containers_folder(&spec), usual, "{spec}");
    }
}

#[test]
fn content_out_of_bounds_is_refused() {
    for name in ["", "/", "/a b", "/../x", "/a\u{1b}[2J", &"x".repeat(MAX_NAME_BYTES + 1)] {
        let (_root, spec) = container(&json!({"Name": name}));
        let got = names(ID, &spec);
        let refused = matches!(got, Err(NamesError::Content { source: ContentError::Name, .. }));
        assert!(refused, "{name:?}: {got:?}");
    }
    for content in [json!([]), json!({"Name": 7}), json!({"Config": {}})] {
        let (_root, spec) = container(&content);
        let got = names(ID, &spec);
        let refused = matches!(got, Err(NamesError::Content { source: ContentError::Json(_), .. }));
        assert!(refused, "{content}: {got:?}");
    }
    let hostile = json!({"com.docker.compose.project": "a/../b"});
    let content = json!({"Name": "/c", "Config": {"Image": "a\nb", "Labels": hostile}});
    let (_root, spec) = container(&content);
    let wanted = DockerNames { container: "c".into(), image: String::new() };
    assert_eq!(names(ID, &spec).unwrap(), wanted);
}

#[test]
fn only_a_regular_file_of_bounded_size_is_read() {
    let (root, spec) = container(&json!({"Name": "/a", "Padding": "x".repeat(MAX_BYTES as usize)}));
    assert!(matches!(names(ID, &spec), Err(NamesError::Read { .. })));
    let file = root.path().join(CONTAINERS).join(ID).join(FILE);
    let elsewhere = root.path().join("elsewhere");
    std::fs::write(&elsewhere, json!({"Name": "/a"}).to_string()).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(names(ID, &spec), Err(NamesError::Read { .. })));
    std::os::unix::fs::symlink(&elsewhere, &file).unwrap();
    assert!(matches!(names(ID, &spec), Err(NamesError::Read { .. })), "a link is not followed");
    std::fs::remove_file(&file).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &file,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(
        matches!(names(ID, &spec), Err(NamesError::Read { .. })),
        "a pipe does not block the reader"
    );
}
