use std::fs;
use std::path::PathBuf;

use affinode_proto::paths::{CONTAINER_LIB, ENGINE_FILE, LIB_FILE, VRAM_LIMIT_FILE};
use affinode_proto::wire::Engine;
use containerd_shim_protos::types::mount::Mount;
use serde_json::json;

use super::*;
use crate::paths::container_key;

const SETTINGS: StartSettings = StartSettings { engine: Engine::Copy, vram_limit_bytes: 20 << 30 };

/// Returns the settings that the controller's configuration would select for the container.
fn start_settings_of(config: &Path, container: &Announcement) -> StartSettings {
    assert_eq!(config.file_name().unwrap(), "affinode.toml");
    assert_eq!((container.id.as_str(), container.namespace.as_str()), ("box", "ns"));
    SETTINGS
}

/// Test setup: a bundle, a rootfs of one folder, and an installation of Affinode.
struct World {
    dir: tempfile::TempDir,
    paths: ShimPaths,
    request: CreateTaskRequest,
}

fn world(spec: &Value) -> World {
    let dir = tempfile::tempdir().unwrap();
    for name in ["bundle", "image/etc", "lib"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
    }
    let paths = ShimPaths {
        run_dir: dir.path().join("run"),
        lib_dir: dir.path().join("lib"),
        config: dir.path().join("affinode.toml"),
    };
    fs::write(paths.lib_dir.join(LIB_FILE), "ELF").unwrap();
    let mut request = CreateTaskRequest::new();
    request.id = "box".to_owned();
    request.bundle = dir.path().join("bundle").to_str().unwrap().to_owned();
    request.rootfs.push(Mount {
        type_: "bind".to_owned(),
        source: dir.path().join("image").to_str().unwrap().to_owned(),
        options: vec!["rbind".to_owned(), "rw".to_owned()],
        ..Mount::default()
    });
    let world = World { dir, paths, request };
    world.write(&spec.to_string());
    world
}

impl World {
    fn config(&self) -> PathBuf {
        self.dir.path().join("bundle/config.json")
    }

    fn write(&self, text: &str) {
        fs::write(self.config(), text).unwrap();
    }

    fn read(&self) -> String {
        fs::read_to_string(self.config()).unwrap()
    }

    /// Calls [`prepare`] for the container. Returns the generation separately, because it differs
    /// each time.
    fn prepare(&self) -> PreparedContainer {
        let mut prepared = prepare(&self.paths, "ns", &self.request, start_settings_of);
        if let Some(container) = &mut prepared.container {
            assert_ne!(std::mem::take(&mut container.generation), 0);
        }
        prepared
    }

    fn preload(&self) -> PathBuf {
        self.paths.container(&container_key("ns", "box")).preload()
    }

    /// Asserts that the bundle is unchanged, byte by byte.
    fn assert_untouched(&self, why: &str) {
        let before = fs::read(self.config()).ok();
        assert_eq!(self.prepare().container, None, "{why}");
        assert_eq!(fs::read(self.config()).ok(), before, "{why}");
        assert!(!self.preload().exists(), "{why}");
        let left: Vec<_> = fs::read_dir(self.dir.path().join("bundle")).unwrap().collect();
        assert!(left.len() <= 1, "{why}: the bundle has a new file");
    }
}

fn gpu() -> Value {
    json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "annotations": {"affinode.io/priority": "1"}
    })
}

#[test]
fn a_gpu_container_is_edited_and_announced() {
    let world = world(&gpu());
    fs::write(world.dir.path().join("image/etc/ld.so.preload"), "/own.so\n").unwrap();
    let prepared = world.prepare();
    let container = prepared.container.clone().unwrap();
    assert_eq!(container.annotations["affinode.io/priority"], "1");
    assert_eq!(prepared.options, None);
    let spec: Value = serde_json::from_str(&world.read()).unwrap();
    let mounts = spec["mounts"].as_array().unwrap();
    let seen: Vec<_> = mounts
        .iter()
        .map(|mount| (mount["destination"].as_str().unwrap(), mount["source"].as_str().unwrap()))
        .collect();
    let run = world.dir.path().join("run/containers").join(&container.key);
    assert_eq!(
        seen,
        [
            ("/proc", "proc"),
            ("/.affinode/lib", world.paths.lib_dir.to_str().unwrap()),
            ("/.affinode/run", run.join("mount").to_str().unwrap()),
            ("/etc/ld.so.preload", run.join("ld.so.preload").to_str().unwrap()),
        ]
    );
    let merged = fs::read_to_string(world.preload()).unwrap();
    assert_eq!(merged, format!("/own.so\n{CONTAINER_LIB}\n"));

    let edited = world.read();
    assert_eq!(world.prepare(), prepared, "a second Create");
    assert_eq!(world.read(), edited);
}

#[test]
fn policy_of_a_claim_is_announced() {
    let mut spec = gpu();
    let world = world(&spec);
    let file = world.paths.run_dir.join("claims/u-1-0");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let policy = r#"{"affinode.io/priority": "9", "affinode.io/offload": "eager"}"#;
    fs::write(&file, policy).unwrap();
    let mount = json!({"destination": "/.affinode/claims/u-1-0", "source": file, "type": "bind"});
    spec["mounts"].as_array_mut().unwrap().push(mount);
    world.write(&spec.to_string());
    let annotations = world.prepare().container.unwrap().annotations;
    assert_eq!(annotations["affinode.io/offload"], "eager");
    assert_eq!(annotations["affinode.io/priority"], "1", "the pod's annotation takes precedence");
}

/// The container's folder must have files with the engine and the VRAM limit. A process needs them
/// when it looks up driver functions and allocates, which may be before it reaches a controller.
#[test]
fn the_settings_are_left_in_the_container() {
    let world = world(&gpu());
    let container = world.prepare().container.unwrap();
    let folder = world.paths.container(&container.key).mount();
    assert_eq!(fs::read_to_string(folder.join(ENGINE_FILE)).unwrap(), "copy");
    assert_eq!(fs::read_to_string(folder.join(VRAM_LIMIT_FILE)).unwrap(), "21474836480");
}

/// HAMi's device plugin mounts a preload list over the image's list. HAMi's library must stay
/// before Affinode's in the merged list, so that HAMi's functions are called first.
#[test]
fn a_list_that_the_host_mounts_comes_before_ours() {
    let world = world(&gpu());
    fs::write(world.dir.path().join("image/etc/ld.so.preload"), "/hidden.so\n").unwrap();
    let list = world.dir.path().join("list");
    fs::write(&list, "/usr/local/vgpu/libvgpu.so").unwrap();
    let mut spec = gpu();
    let mount = json!({"destination": "/etc/ld.so.preload", "type": "bind", "source": list, "options": ["rbind", "ro"]});
    spec["mounts"].as_array_mut().unwrap().push(mount);
    world.write(&spec.to_string());
    let prepared = world.prepare();
    assert!(prepared.container.is_some());
    let merged = || fs::read_to_string(world.preload()).unwrap();
    assert_eq!(merged(), format!("/usr/local/vgpu/libvgpu.so\n{CONTAINER_LIB}\n"));
    let edited = world.read();
    assert!(
        !edited.contains(list.to_str().unwrap()) && edited.matches("ld.so.preload\"").count() == 2
    );
    assert_eq!(world.prepare(), prepared, "a second Create");
    assert_eq!((world.read(), merged().lines().count()), (edited, 2));

    fs::remove_file(world.preload()).unwrap();
    world.write(&spec.to_string());
    fs::remove_file(&list).unwrap();
    world.assert_untouched("the mounted preload list does not exist");
}

#[test]
fn a_container_without_a_gpu_keeps_its_bytes() {
    // A config.json with blanks and an order of keys that would be lost if it were encoded again.
    let world = world(&json!({}));
    world.write("{ \"ociVersion\" : \"1.0.2\",\n \"linux\":{\"cgroupsPath\":\"a.slice:b:c\"} }\n");
    world.assert_untouched("no GPU");
    let options = world.prepare().options.unwrap();
    assert_eq!(
        options.type_url,
        options::RUNC_OPTIONS,
        "options are translated even without a GPU"
    );
}

#[test]
fn obstacle_leaves_container_unmanaged() {
    let plain = || world(&gpu());

    let world = plain();
    fs::remove_file(world.paths.library()).unwrap();
    world.assert_untouched("no library");

    let world = plain();
    world.write("{\"process\": ");
    world.assert_untouched("not JSON");

    let world = plain();
    fs::remove_file(world.config()).unwrap();
    world.assert_untouched("no config.json");

    let mut world = plain();
    world.request.bundle = "/nowhere".to_owned();
    world.assert_untouched("no bundle");

    let mut world = plain();
    world.request.rootfs[0].type_ = "erofs".to_owned();
    world.request.rootfs[0].options.clear();
    world.assert_untouched("unknown snapshotter");

    let mut world = plain();
    world.request.rootfs[0].options = vec!["rbind".to_owned(), "ro".to_owned()];
    world.assert_untouched("read-only rootfs");

    let world = plain();
    std::os::unix::fs::symlink("/dev/null", world.dir.path().join("image/etc/ld.so.preload"))
        .unwrap();
    world.assert_untouched("a dangling symlink");

    let world = plain();
    fs::create_dir(world.dir.path().join("image/etc/ld.so.preload")).unwrap();
    world.assert_untouched("a folder at the path of the preload list");

    let world = plain();
    let mut spec = gpu();
    spec["mounts"] = json!([{"destination": "/etc", "type": "bind", "source": "/x"}]);
    world.write(&spec.to_string());
    world.assert_untouched("a volume over /etc");

    let world = plain();
    let mut spec = gpu();
    spec["annotations"] = json!({"affinode.io/inject": "false"});
    world.write(&spec.to_string());
    world.assert_untouched("switched off");

    let world = plain();
    fs::write(&world.paths.run_dir, "a file").unwrap();
    world.assert_untouched("no run directory");
}

#[test]
fn options_that_cannot_be_read_are_passed_on() {
    let mut world = world(&gpu());
    let mut any = Any::new();
    any.type_url = "runtimeoptions.v1.Options".to_owned();
    any.value = vec![0x1a, 5, b'=', b'='];
    world.request.options = Some(any).into();
    let prepared = world.prepare();
    assert_eq!(prepared.options, None);
    assert!(prepared.container.is_some());
}
