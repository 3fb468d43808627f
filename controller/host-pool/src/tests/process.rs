//! Tests of the host pool's process.

use std::{
    env, fs,
    process::{Command, Stdio},
};

use super::*;
use crate::{cgroup_path, used_bytes};

/// Name of the variable with the cgroup, in the child process of the next test.
const CGROUP_ENV: &str = "AFFINODE_TEST_CGROUP";

/// The test starts itself again as the host pool's process.
#[test]
fn memory_is_charged_to_the_pools_cgroup() {
    if let Some(cgroup) = env::var_os(CGROUP_ENV) {
        crate::main(std::iter::once(cgroup)).unwrap();
        return;
    }
    let cgroup = cgroup_path(&format!("affinode-test-host-pool-{}", std::process::id()));
    let (controller, theirs) = pair();
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "tests::process::memory_is_charged_to_the_pools_cgroup"])
        .env(CGROUP_ENV, &cgroup)
        .stdin(Stdio::from(theirs))
        .spawn()
        .unwrap();
    let (ours, theirs) = pair();
    let attach = HostPoolOrder::Attach { process: 7, container: 7 };
    let allow = HostPoolOrder::Allow { process: 7, bytes: 64 * MIB, kept_bytes: 0 };
    socket::send(&controller, &attach.encode(), Some(&theirs)).unwrap();
    drop(theirs);
    socket::send(&controller, &allow.encode(), None::<OwnedFd>).unwrap();
    let (_, file) = socket::receive_with_descriptor(&ours).unwrap().unwrap();
    let agent = Agent { socket: ours, file: file.unwrap() };
    let before = used_bytes(&cgroup).unwrap();
    assert!(agent.populate(0, 64 * MIB));
    let after = used_bytes(&cgroup).unwrap();
    drop((controller, agent));
    assert!(child.wait().unwrap().success());
    fs::remove_dir(&cgroup).unwrap();
    // The kernel charges memory in advance, some for each processor, and may return it meanwhile.
    assert!(after >= before + 56 * MIB, "{before} and {after}");
}
