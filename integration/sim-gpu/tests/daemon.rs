//! Tests of the daemon with clients that do not use the simulated libraries, and with hostile
//! clients.

#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

mod support;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use affinode_sim_protocol::{Operation, Order, Packet, Reply, Report, Request, code};
use support::{MIB, Node, wait_for};

fn connect(node: &Node) -> Packet {
    Packet::connect(&node.socket()).unwrap()
}

fn ask_with(packet: &Packet, request: &Request, fd: Option<&OwnedFd>) -> (Reply, Option<OwnedFd>) {
    packet.send(request, fd.map(AsFd::as_fd)).unwrap();
    packet.receive().unwrap().unwrap()
}

fn ask(packet: &Packet, request: &Request) -> Reply {
    ask_with(packet, request, None).0
}

fn checkpoint(node: &Node, operation: Operation) -> Reply {
    ask(&connect(node), &Request::Checkpoint { pid: std::process::id() as i32, operation })
}

fn attach(node: &Node) -> Packet {
    let packet = connect(node);
    assert!(matches!(ask(&packet, &Request::Attach), Reply::Attached { .. }));
    packet
}

/// Acts as a CUDA process that replies to every order of the daemon with success.
fn obey(node: &Node) {
    let packet = connect(node);
    assert_eq!(ask(&packet, &Request::Control { tid: 7 }), Reply::Done);
    thread::spawn(move || {
        while let Ok(Some((_, _))) = packet.receive::<Order>() {
            packet.send(&Report::default(), None).unwrap();
        }
    });
}

#[test]
fn exporter_is_restored_apart_from_importer() {
    let node = Node::start(&[]);
    let importer = attach(&node);
    // Checkpoint calls for this pid must apply to the process that attached last.
    let owner = attach(&node);
    obey(&node);
    let Reply::Object { object, .. } = ask(&owner, &Request::Allocate { gpu: 0, bytes: MIB })
    else {
        panic!()
    };
    let (_, exported) = ask_with(&owner, &Request::Export { object }, None);
    let exported = exported.unwrap();

    // Memory that was exported but not imported by another process must not prevent the checkpoint.
    assert_eq!(checkpoint(&node, Operation::Lock { timeout_ms: 0 }), Reply::Done);
    assert_eq!(checkpoint(&node, Operation::RestoreThread), Reply::Thread(7));
    assert_eq!(checkpoint(&node, Operation::Save), Reply::Done);
    assert_eq!(node.used_bytes(0), 0);
    let checkpointed = ask_with(&importer, &Request::Import, Some(&exported)).0;
    assert_eq!(
        checkpointed,
        Reply::Error(code::INVALID_HANDLE),
        "nothing can be imported while it is checkpointed"
    );
    assert_eq!(checkpoint(&node, Operation::Restore { gpu_pairs: vec![] }), Reply::Done);

    let imported = ask_with(&importer, &Request::Import, Some(&exported)).0;
    assert_eq!(imported, Reply::Object { object, gpu: 0, bytes: MIB });
    assert_eq!(node.used_bytes(0), MIB, "counted once");
    assert_eq!(checkpoint(&node, Operation::Save), Reply::Done);
    assert_eq!(node.used_bytes(0), MIB, "the other process holds it");
    assert_eq!(checkpoint(&node, Operation::Restore { gpu_pairs: vec![] }), Reply::Done);
    assert_eq!(node.used_bytes(0), 2 * MIB, "each has its own now");
    assert_eq!(ask(&owner, &Request::Free { object }), Reply::Done);
    assert_eq!(node.used_bytes(0), MIB);
    assert_eq!(ask(&importer, &Request::Free { object }), Reply::Done);
    drop(exported);
    node.wait_used(0, 0);
}

#[test]
fn open_descriptor_keeps_memory_until_closed() {
    let node = Node::start(&[]);
    let owner = attach(&node);
    let Reply::Object { object, .. } = ask(&owner, &Request::Allocate { gpu: 0, bytes: MIB })
    else {
        panic!()
    };
    let (_, exported) = ask_with(&owner, &Request::Export { object }, None);
    drop(owner);
    let other = attach(&node);
    let imported = ask_with(&other, &Request::Import, exported.as_ref()).0;
    assert_eq!(imported, Reply::Object { object, gpu: 0, bytes: MIB });
    assert_eq!(ask(&other, &Request::Free { object }), Reply::Done);
    assert_eq!(node.used_bytes(0), MIB);
    drop(exported);
    node.wait_used(0, 0);
}

#[test]
fn a_process_that_dies_in_an_order_ends_the_call() {
    let node = Node::start(&[]);
    let process = attach(&node);
    let control = connect(&node);
    assert_eq!(ask(&control, &Request::Control { tid: 7 }), Reply::Done);
    let node = Arc::new(node);
    let caller = Arc::clone(&node);
    let call = thread::spawn(move || checkpoint(&caller, Operation::Lock { timeout_ms: 0 }));
    assert!(matches!(
        control.receive::<Order>().unwrap(),
        Some((Order::Lock { timeout_ms: 0 }, None))
    ));
    drop(process);
    assert_eq!(call.join().unwrap(), Reply::Error(code::OPERATING_SYSTEM));
}

#[test]
fn nonsense_is_refused_and_harms_nobody() {
    let node = Node::start(&["--vram-mib", "64"]);
    for garbage in
        [&b"{"[..], b"\xff\xfe", b"null", br#"{"Allocate":{"gpu":-1,"bytes":1}}"#, b"[[[[[[[["]
    {
        let packet = connect(&node);
        nix::sys::socket::send(
            packet.as_fd().as_raw_fd(),
            garbage,
            nix::sys::socket::MsgFlags::empty(),
        )
        .unwrap();
        assert!(!matches!(packet.receive::<Reply>(), Ok(Some(_))), "the connection ends");
    }
    let stranger = connect(&node);
    assert_eq!(
        ask(&stranger, &Request::Allocate { gpu: 0, bytes: 1 }),
        Reply::Error(code::NOT_INITIALIZED)
    );

    let process = attach(&node);
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    let (_, pipe) = nix::unistd::pipe().unwrap();
    for (request, fd, expected) in [
        (Request::Attach, None, code::INVALID_VALUE),
        (Request::Allocate { gpu: 0, bytes: 0 }, None, code::INVALID_VALUE),
        (Request::Allocate { gpu: 0, bytes: u64::MAX }, None, code::OUT_OF_MEMORY),
        (Request::Allocate { gpu: usize::MAX, bytes: 1 }, None, code::INVALID_DEVICE),
        (Request::CreateContext { gpu: 9 }, None, code::INVALID_DEVICE),
        (Request::Free { object: 12345 }, None, code::INVALID_VALUE),
        (Request::Export { object: 12345 }, None, code::INVALID_VALUE),
        (Request::Import, None, code::INVALID_VALUE),
        (Request::Import, Some(&file), code::INVALID_VALUE),
        (Request::Import, Some(&pipe), code::INVALID_VALUE),
        (Request::IpcOpen { token: String::from("guess") }, None, code::INVALID_VALUE),
        (Request::Memory { gpu: 3 }, None, code::INVALID_DEVICE),
    ] {
        assert_eq!(ask_with(&process, &request, fd).0, Reply::Error(expected), "{request:?}");
    }
    assert_eq!(ask(&process, &Request::DestroyContext { gpu: 9 }), Reply::Done);
    assert_eq!(node.used_bytes(0), 0);
    let mut worker = node.worker(4);
    worker.expect_intact();
}

#[test]
fn device_memory_cannot_be_resized_by_its_holder() {
    let node = Node::start(&[]);
    let process = attach(&node);
    let (_, memory) = ask_with(&process, &Request::Allocate { gpu: 0, bytes: MIB }, None);
    let memory = std::fs::File::from(memory.unwrap());
    assert_eq!(memory.metadata().unwrap().len(), MIB);
    assert!(memory.set_len(0).is_err());
    assert!(memory.set_len(2 * MIB).is_err());
}

#[test]
fn clients_that_come_and_go_leave_no_vram_behind() {
    let node = Node::start(&[]);
    for _ in 0..50 {
        let process = attach(&node);
        assert!(matches!(
            ask(&process, &Request::Allocate { gpu: 0, bytes: MIB }),
            Reply::Object { .. }
        ));
        assert_eq!(ask(&process, &Request::CreateContext { gpu: 0 }), Reply::Done);
    }
    wait_for("an empty GPU", || node.used_bytes(0) == 0);
}
