//! Tests of the child process of the host pool. Small programs such as `sleep` run in its place.

use std::time::Duration;

use affinode_copier::socket;

use super::*;

/// Time after which a test that still waits has failed.
const TOO_LONG: Duration = Duration::from_secs(60);

fn host_pool(program: fn(&Path, Option<&DiskFolder>) -> Command) -> HostPool {
    HostPool { program, ..HostPool::new("/sys/fs/cgroup/affinode-test".into(), None) }
}

fn sleeper(_: &Path, _: Option<&DiskFolder>) -> Command {
    let mut command = Command::new("sleep");
    command.arg("600");
    command
}

/// A program that exits when it has read one packet from its standard input.
fn reader(_: &Path, _: Option<&DiskFolder>) -> Command {
    let mut command = Command::new("dd");
    command.args(["bs=128", "count=1", "status=none"]);
    command
}

/// A program that fails when it has read one packet. If it did not read, the packet could find the
/// socket closed.
fn failing_reader(_: &Path, _: Option<&DiskFolder>) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "dd bs=128 count=1 status=none > /dev/null; exit 1"]);
    command
}

async fn until(condition: impl Fn() -> bool) {
    let poll = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(TOO_LONG, poll).await.unwrap();
}

#[tokio::test]
async fn orders_pass_the_socket() {
    let mut pool = host_pool(sleeper);
    let (ours, theirs) = pair().unwrap();
    let own_stdin = pair().unwrap().1;
    let child = HostPoolProcess::start(sleeper(pool.cgroup(), None), ours, own_stdin).unwrap();
    pool.child = Some(child);
    let agent = pool.attach(ProcessId(7), 5).unwrap();
    pool.allow(ProcessId(7), 100, 3).unwrap();
    let (frame, attached) = socket::receive(&theirs).unwrap();
    assert_eq!(
        HostPoolOrder::decode(&frame),
        Ok(HostPoolOrder::Attach { process: 7, container: 5 })
    );
    socket::send(&agent, &frame, None).unwrap();
    assert_eq!(socket::receive(attached.unwrap()).unwrap().0, frame, "both ends are connected");
    let (frame, _) = socket::receive(&theirs).unwrap();
    assert_eq!(
        HostPoolOrder::decode(&frame),
        Ok(HostPoolOrder::Allow { process: 7, bytes: 100, kept_bytes: 3 })
    );
    pool.allow_disk(ProcessId(7), 1 << 30).unwrap();
    let (frame, _) = socket::receive(&theirs).unwrap();
    let allowed = HostPoolOrder::AllowDisk { process: 7, bytes: 1 << 30 };
    assert_eq!(HostPoolOrder::decode(&frame), Ok(allowed));
}

#[tokio::test]
async fn the_first_attach_starts_the_process() {
    let mut pool = host_pool(sleeper);
    assert!(!pool.is_running());
    assert!(pool.allow(ProcessId(7), 100, 3).is_err());
    pool.attach(ProcessId(7), 5).unwrap();
    assert!(pool.is_running());
    pool.attach(ProcessId(8), 5).unwrap();
    pool.allow(ProcessId(7), 100, 3).unwrap();
}

#[tokio::test]
async fn ended_host_pool_is_started_after_a_while() {
    let mut pool = host_pool(reader);
    pool.attach(ProcessId(7), 5).unwrap();
    until(|| !pool.is_running()).await;
    assert!(pool.allow(ProcessId(7), 100, 3).is_err());
    assert!(pool.attach(ProcessId(7), 5).is_err(), "the next start must wait");
    tokio::time::pause();
    tokio::time::advance(RESTART_AFTER).await;
    pool.attach(ProcessId(7), 5).unwrap();
    assert!(pool.is_running());
}

/// On a node where the host pool cannot run, no offload may be sent to it.
#[tokio::test]
async fn host_pool_that_fails_is_not_usable() {
    let mut pool = host_pool(failing_reader);
    assert!(pool.is_usable(), "a host pool counts as usable until it fails");
    pool.attach(ProcessId(7), 5).unwrap();
    until(|| !pool.is_running()).await;
    assert!(!pool.is_usable());
    tokio::time::pause();
    tokio::time::advance(UNUSABLE_FOR).await;
    assert!(pool.is_usable(), "the host pool counts as usable again");

    // A program that ends without an error, or by a signal, is started again.
    let mut pool = host_pool(reader);
    pool.attach(ProcessId(7), 5).unwrap();
    tokio::time::resume();
    until(|| !pool.is_running()).await;
    assert!(pool.is_usable());
    let mut pool = host_pool(|_, _| Command::new("/nonexistent/program"));
    pool.attach(ProcessId(7), 5).unwrap_err();
    assert!(!pool.is_usable());
}

#[tokio::test]
async fn failed_start_is_not_repeated_at_once() {
    let mut pool = host_pool(|_, _| Command::new("/nonexistent/program"));
    let refused = pool.attach(ProcessId(7), 5).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    pool.program = sleeper;
    assert!(pool.attach(ProcessId(7), 5).is_err());
    assert!(!pool.is_running());
    tokio::time::pause();
    tokio::time::advance(RESTART_AFTER).await;
    pool.attach(ProcessId(7), 5).unwrap();
}

#[tokio::test]
async fn a_dropped_host_pool_is_killed() {
    let (ours, theirs) = pair().unwrap();
    let child = HostPoolProcess::start(sleeper(Path::new("/"), None), ours, theirs).unwrap();
    let is_running = child.watch();
    drop(child);
    until(|| !is_running()).await;
}

#[test]
fn the_command_names_the_cgroup() {
    let cgroup = Path::new("/sys/fs/cgroup/affinode");
    let disk = DiskFolder { path: "/var/lib/disk".into(), max_bytes: 3 << 20 };
    for (disk, more) in [(None, &[][..]), (Some(&disk), &["/var/lib/disk", "3145728"])] {
        let command = child::command(cgroup, disk);
        let args: Vec<_> = command.as_std().get_args().collect();
        assert_eq!(args, [&["host-pool", "/sys/fs/cgroup/affinode"], more].concat());
    }
}
