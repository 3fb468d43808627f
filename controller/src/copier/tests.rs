//! Tests of the child processes of copiers. Small programs such as `sleep` run in place of a
//! copier.

use std::{process::Stdio, time::Duration};

use affinode_copier::socket;
use std::path::Path;

use affinode_proto::wire::message::FRAME_BYTES;
use tokio::process::Command;

use super::*;

const GPU: &str = "GPU-1";
const ID: CopierId = CopierId(1);

type CopierMail = mpsc::UnboundedReceiver<CopierMessage>;

/// Starts a copier whose process is `sleep`. Also returns the copier's end of its socket.
fn with_sleeper() -> (CopierProcesses, OwnedFd, CopierMail) {
    let (mail, from) = mpsc::unbounded_channel();
    let mut copiers = CopierProcesses::new(DriverLibrary::new("", Path::new("")), mail.clone());
    let (ours, theirs) = pair().unwrap();
    let mut command = Command::new("sleep");
    command.arg("600").stdin(Stdio::null());
    let child = CopierProcess::spawn(command, ours, ID, mail, |_| {}).unwrap();
    let copier = RunningCopier { gpu: GPU.into(), child, ends: false, vram_bytes: 0 };
    copiers.running.insert(ID, copier);
    (copiers, theirs, from)
}

async fn next(from: &mut CopierMail) -> CopierMessage {
    tokio::time::timeout(Duration::from_secs(60), from.recv()).await.unwrap().unwrap()
}

fn order(copier: &OwnedFd) -> CopierOrder {
    let (frame, _): ([u8; FRAME_BYTES], _) = socket::receive(copier).unwrap();
    CopierOrder::decode(&frame).unwrap()
}

#[tokio::test]
async fn orders_and_reports_pass_the_socket() {
    let (mut copiers, copier, mut from) = with_sleeper();
    copiers.tell(ID, CopierOrder::HoldVram { on: true }).unwrap();
    assert_eq!(order(&copier), CopierOrder::HoldVram { on: true });
    copiers.attach(ID, ProcessId(7), 100, 3).unwrap();
    assert_eq!(order(&copier), CopierOrder::Attach { process: 7, most_bytes: 100, domain: 3 });
    socket::send(&copier, &CopierReport::Ready.encode(), None).unwrap();
    assert_eq!(next(&mut from).await, CopierMessage::Report(ID, CopierReport::Ready));
    drop(copier);
    assert_eq!(next(&mut from).await, CopierMessage::Closed(ID));
    assert!(copiers.tell(ID, CopierOrder::HoldVram { on: false }).is_err());
}

/// Checks that the exit of a copier is reported after the controller has ended the copier. Until
/// this report, the core takes no proof of free VRAM, because the copier holds VRAM until its exit.
#[tokio::test]
async fn an_ended_copier_reports_its_exit() {
    let (mut copiers, _copier, mut from) = with_sleeper();
    let pid = copiers.pids().next().unwrap();
    assert_eq!(copiers.end(ID), Some(GPU));
    assert_eq!(next(&mut from).await, CopierMessage::Exited(ID));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "it has ended");
    copiers.forget(ID);
    assert!(copiers.end(ID).is_none() && copiers.pids().next().is_none());
    let refused = copiers.attach(ID, ProcessId(7), 100, 0);
    assert!(matches!(refused, Err(AttachError::Exited)));
}

#[tokio::test]
async fn a_copier_that_exits_by_itself_is_reported() {
    let (mut copiers, _copier, mut from) = with_sleeper();
    let pid = copiers.pids().next().unwrap();
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(next(&mut from).await, CopierMessage::Exited(ID));
    copiers.forget(ID);
}

#[tokio::test]
async fn nvml_shows_the_vram_of_a_copier() {
    let (mut copiers, _copier, _from) = with_sleeper();
    let pid = copiers.pids().next().unwrap();
    let processes = vec![(pid, 500), (pid + 1, 9)];
    copiers.seen(&[GpuSample { uuid: GPU.into(), processes, ..GpuSample::default() }]);
    let shown = |copiers: &CopierProcesses| {
        let mut gpu = control::Gpu { uuid: GPU.into(), ..control::Gpu::default() };
        copiers.show(&mut gpu);
        (gpu.copier_pid, gpu.copier_vram_bytes)
    };
    assert_eq!(shown(&copiers), (pid, 500));
    copiers.end(ID);
    assert_eq!(shown(&copiers), (0, 0), "a copier that was told to end is not shown");
}
