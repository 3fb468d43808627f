//! Tests of the driver's private function tables, and of tools that use them. All results were
//! measured on a real driver.

#![allow(clippy::unwrap_used, reason = "a panic in a test is its failure")]

mod support;

use support::{Client, Node, wait_for};

const SIGSEGV: i32 = 11;
const AWAY: [&str; 2] = ["lock", "checkpoint"];
const BACK: [&str; 2] = ["restore", "unlock"];
/// Results of the first and of every later restore, if a tool was active in the process during the
/// checkpoint.
const LOST: [i64; 2] = [999, 304];

fn ready(node: &Node, program: &str) -> Client {
    let mut client = node.client(program, &["2"]);
    assert_eq!(client.answer("ready")["result"], 0);
    client
}

#[test]
fn runtime_table_is_checked_and_survives_a_cycle() {
    let node = Node::start(&[]);
    let mut runtime = ready(&node, "runtime");
    assert_eq!(node.checkpoint(runtime.pid(), &AWAY), [0, 0]);
    assert_eq!(runtime.ask("check")["ok"], true, "it needs no context");
    assert_eq!(node.checkpoint(runtime.pid(), &BACK), [0, 0]);
    runtime.expect("touch", 0);
    runtime.expect("settle", 0);
    runtime.expect_intact();
}

#[test]
fn table_call_without_context_kills_caller() {
    let node = Node::start(&[]);
    let mut runtime = ready(&node, "runtime");
    assert_eq!(node.checkpoint(runtime.pid(), &AWAY), [0, 0]);
    runtime.send("settle");
    assert_eq!(runtime.fatal_signal(), Some(SIGSEGV));
}

#[test]
fn profiler_without_context_loses_process() {
    let node = Node::start(&[]);
    let mut program = ready(&node, "tools");
    assert_eq!(node.checkpoint(program.pid(), &AWAY), [0, 0]);
    program.expect_blocked("begin");
    for code in LOST {
        assert_eq!(node.checkpoint(program.pid(), &["restore"]), [code]);
    }
}

/// Starts a profiler and checkpoints the process at the same time. The process must be lost,
/// whether the checkpoint comes before, during or after the profiler's start.
#[test]
fn profiler_during_checkpoint_loses_process() {
    let node = Node::start(&[]);
    let mut program = ready(&node, "tools");
    program.send("begin 500");
    assert_eq!(node.checkpoint(program.pid(), &AWAY), [0, 0]);
    let code = node.checkpoint(program.pid(), &["restore"]);
    assert!(code == [LOST[0]] || program.fatal_signal() == Some(SIGSEGV), "{code:?}");
}

/// A profiler that has ended leaves a thread, which still calls the driver. If such a call is made
/// while the process is checkpointed, it must end the process.
#[test]
fn ended_profiler_still_reaches_driver() {
    let node = Node::start(&[]);
    let mut program = ready(&node, "tools");
    program.expect("begin", 0);
    program.expect("end", 0);
    program.expect_intact();
    assert_eq!(node.checkpoint(program.pid(), &AWAY), [0, 0]);
    // The program's input stays open, so that the program does not end by itself.
    let file = format!("/proc/{}/stat", program.pid());
    wait_for("its end", || std::fs::read_to_string(&file).is_ok_and(|stat| stat.contains(") Z ")));
    assert_eq!(program.fatal_signal(), Some(SIGSEGV));
}
