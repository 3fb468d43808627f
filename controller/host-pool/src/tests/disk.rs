//! Tests of content on disk. They use the disk on which temporary files are.

use std::{fs::File, os::unix::fs::FileExt};

use aes_gcm::{AeadInPlace, Aes256Gcm, KeyInit};
use affinode_proto::wire::host_pool::{DISK_PIECE_BYTES, DiskKey, DiskTag, disk_nonce};
use rustix::fs::OFlags;
use tempfile::TempDir;

use super::*;

const KEY: DiskKey = [7; 32];
const PIECE: u64 = DISK_PIECE_BYTES;

struct Disk {
    folder: TempDir,
    pool: TestPool,
}

fn start(max_bytes: u64) -> Disk {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::write(folder.path().join("affinode-disk-1-2"), "").unwrap();
    let disk = DiskFolder::open(folder.path(), max_bytes).unwrap();
    Disk { folder, pool: TestPool::start_with(TOO_LONG, Some(disk)) }
}

impl Disk {
    /// Attaches a process with `pieces` pieces in memory, which may store `allowed` pieces.
    fn process(&self, process: u64, pieces: u64, allowed: u64) -> Agent {
        let agent = self.pool.attach(process);
        self.pool.allow(process, pieces * PIECE);
        for piece in 0..pieces {
            assert!(agent.populate(piece * PIECE, PIECE));
            fill(&agent, piece, piece as u8 + 1);
        }
        self.pool.order(HostPoolOrder::AllowDisk { process, bytes: allowed * PIECE }, None);
        agent
    }

    fn names(&self) -> usize {
        std::fs::read_dir(self.folder.path()).unwrap().count()
    }
}

fn fill(agent: &Agent, piece: u64, value: u8) {
    let memory = File::from(agent.file.try_clone().unwrap());
    memory.write_all_at(&vec![value; PIECE as usize], piece * PIECE).unwrap();
}

impl Agent {
    fn say(&self, message: ToHostPool) {
        socket::send(&self.socket, &message.encode(), None::<OwnedFd>).unwrap();
    }

    fn open_disk(&self) -> Option<OwnedFd> {
        self.say(ToHostPool::OpenDisk);
        let (frame, file) = socket::receive_with_descriptor(&self.socket).unwrap().unwrap();
        let done = file.is_some();
        assert_eq!(FromHostPool::decode(&frame), Ok(FromHostPool::DiskFile { done }));
        file
    }

    fn store(&self, piece: u64) -> Option<DiskTag> {
        self.say(ToHostPool::Store { offset: piece * PIECE, bytes: PIECE, key: KEY });
        let frame = socket::receive(&self.socket).unwrap().expect("the connection has ended");
        match FromHostPool::decode(&frame) {
            Ok(FromHostPool::Stored { offset, done, tag }) => {
                assert_eq!(offset, piece * PIECE);
                done.then_some(tag)
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Reads a piece of a disk file and decrypts it. The file is opened again without direct I/O, which
/// needs aligned memory.
fn read(file: &OwnedFd, piece: u64, tag: DiskTag) -> Option<Vec<u8>> {
    let flags = rustix::fs::fcntl_getfl(file).unwrap().difference(OFlags::DIRECT);
    rustix::fs::fcntl_setfl(file, flags).unwrap();
    let mut content = vec![0; PIECE as usize];
    let file = File::from(file.try_clone().unwrap());
    file.read_exact_at(&mut content, piece * PIECE).unwrap();
    let nonce = disk_nonce(piece * PIECE);
    Aes256Gcm::new(&KEY.into())
        .decrypt_in_place_detached(&nonce.into(), b"", &mut content, &tag.into())
        .ok()?;
    Some(content)
}

#[test]
fn stored_piece_is_encrypted_and_read_back() {
    let disk = start(1 << 40);
    let agent = disk.process(1, 3, 3);
    let file = agent.open_disk().unwrap();
    assert_eq!(disk.names(), 0, "no file has a name, and old names are deleted");
    let tags: Vec<DiskTag> = (0..3).map(|piece| agent.store(piece).unwrap()).collect();
    let clear = vec![2; PIECE as usize];
    assert_eq!(read(&file, 1, tags[1]), Some(clear.clone()));
    assert_eq!(read(&file, 1, tags[2]), None, "another piece's tag");
    let mut written = vec![0; PIECE as usize];
    File::from(file.try_clone().unwrap()).read_exact_at(&mut written, PIECE).unwrap();
    let same = written.iter().zip(&clear).filter(|(a, b)| a == b).count();
    assert!(same < written.len() / 100, "{same} bytes are not encrypted");
    // The process reads its file after the end of the host pool.
    disk.pool.end().unwrap();
    assert_eq!(read(&file, 2, tags[2]), Some(vec![3; PIECE as usize]));
}

#[test]
fn process_cannot_write_its_disk_file() {
    let disk = start(1 << 40);
    let agent = disk.process(1, 1, 1);
    let file = agent.open_disk().unwrap();
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let refused = File::options().write(true).open(again).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::ROFS.raw_os_error()));
    let refused = File::from(file).write_all_at(&[0; 512], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
}

#[test]
fn disk_files_have_a_maximum_size() {
    let disk = start(3 * PIECE);
    let (first, second) = (disk.process(1, 4, 2), disk.process(2, 4, 4));
    let folder = |disk: &Disk| disk.pool.pool.disk_used_bytes();
    let kept = first.open_disk().unwrap();
    assert!(first.store(0).is_some() && first.store(1).is_some());
    assert!(first.store(2).is_none(), "more than the process may store");
    assert!(first.store(1).is_some(), "the piece counts already");
    let _file = second.open_disk().unwrap();
    assert!(second.store(0).is_some());
    assert!(second.store(1).is_none(), "more than the maximum of all files");
    assert_eq!(folder(&disk), 3 * PIECE);
    first.say(ToHostPool::CloseDisk);
    // The reply shows that the file is closed.
    let file = first.open_disk();
    assert!(file.is_some());
    let end = Instant::now() + TOO_LONG;
    while folder(&disk) > PIECE {
        assert!(Instant::now() < end, "the file's size still counts");
        std::thread::yield_now();
    }
    let blocks = rustix::fs::fstat(&kept).unwrap().st_blocks;
    assert_eq!(blocks, 0, "the process keeps its descriptor, but no space");
    assert!(second.store(1).is_some());
    disk.pool.order(HostPoolOrder::AllowDisk { process: 2, bytes: 0 }, None);
    // The host pool carries out its orders one after another.
    drop(disk.pool.attach(3));
    assert!(second.store(1).is_none(), "nothing is written any more");
}

#[test]
fn disk_needs_the_controllers_permission() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = DiskFolder::open(folder.path(), 1 << 40).unwrap();
    let pool = TestPool::start_with(Duration::ZERO, Some(disk));
    let agent = pool.attach(1);
    assert!(agent.open_disk().is_none());
    agent.say(ToHostPool::Store { offset: 0, bytes: PIECE, key: KEY });
    agent.expect_end();

    let pool = TestPool::strict();
    let agent = pool.attach(1);
    pool.order(HostPoolOrder::AllowDisk { process: 1, bytes: PIECE }, None);
    assert!(agent.open_disk().is_none(), "the host pool has no disk folder");
}

#[test]
fn permission_may_arrive_after_the_request() {
    let disk = start(1 << 40);
    let agent = disk.pool.attach(1);
    agent.say(ToHostPool::OpenDisk);
    // The reply of another process shows that the request is not refused at once.
    drop(disk.pool.attach(2));
    disk.pool.order(HostPoolOrder::AllowDisk { process: 1, bytes: PIECE }, None);
    let (frame, file) = socket::receive_with_descriptor(&agent.socket).unwrap().unwrap();
    assert_eq!(FromHostPool::decode(&frame), Ok(FromHostPool::DiskFile { done: true }));
    assert!(file.is_some());
}

#[test]
fn folder_that_cannot_be_used_is_refused() {
    let mounted = tempfile::tempdir().unwrap();
    let refused = DiskFolder::open(&mounted.path().join("missing"), 1).unwrap_err();
    assert!(refused.to_string().contains("missing"), "{refused}");
    // Files in /proc cannot be created, as on a disk that is mounted read-only.
    let proc = DiskFolder::open(std::path::Path::new("/proc/self"), 1 << 40);
    assert!(proc.is_err() || proc.is_ok_and(|folder| folder.create().is_err()));
}

/// The content of a process whose connection has ended takes space until the process closes its file.
#[test]
fn open_file_of_an_ended_connection_counts() {
    let disk = start(2 * PIECE);
    let first = disk.process(1, 1, 1);
    let file = first.open_disk().unwrap();
    assert!(first.store(0).is_some());
    disk.pool.order(HostPoolOrder::Detach { process: 1 }, None);
    first.expect_end();
    let second = disk.process(2, 2, 2);
    let _other = second.open_disk().unwrap();
    assert!(second.store(0).is_some());
    assert!(second.store(1).is_none(), "the maximum is reached");
    drop((first, file));
    let since = Instant::now();
    // The thread of the ended connection closes its own descriptors.
    while second.store(1).is_none() {
        assert!(since.elapsed() < TOO_LONG);
    }
    disk.pool.end().unwrap();
}
