//! Test of prewake: an incoming network connection causes a restore before the next CUDA call.

use std::{
    fs::File,
    net::{TcpListener, TcpStream},
};

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};

use super::report::Rows;
use crate::{
    testbed::Testbed,
    wait::until,
    worker::{USUAL, Worker},
};

/// Runs a client that connects to a server on the loopback interface of a container's network
/// namespace.
///
/// # Errors
/// When the container has no process, or its namespace cannot be entered.
pub fn connect(world: &Testbed, id: &str) -> Result<()> {
    let row = world.cli().known(id)?;
    let pid = row.processes.first().context("the container has no process")?.pid;
    let network = File::open(format!("/proc/{pid}/ns/net"))?;
    let there = std::thread::spawn(move || -> Result<()> {
        setns(network, CloneFlags::CLONE_NEWNET)?;
        let server = TcpListener::bind("127.0.0.1:0")?;
        let _client = TcpStream::connect(server.local_addr()?)?;
        server.accept()?;
        Ok(())
    });
    there.join().map_err(|_| anyhow!("the thread in the container's network namespace panicked"))?
}

/// Offloads a container and connects to it. The connection must restore the container although the
/// container makes no CUDA call.
pub fn brings_back(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let id = "listens";
    let spec = Worker::spec(id, USUAL, 256).annotation("affinode.io/wake-on", "connection");
    let mut worker = Worker::start_as(world, spec)?;
    worker.wait_filled()?;
    world.cli().wait_for_state(id, "Offloaded")?;
    // A connection before the controller's first check has no effect, so the test connects
    // repeatedly until the container is prewoken.
    until("the connection to prewake the container", || {
        connect(world, id)?;
        let row = world.cli().known(id)?;
        Ok((row.restores == 1 && row.reason == "connection").then_some(()))
    })?;
    rows.count("back before a call", 1, 1);
    rows.count("contents as before", usize::from(worker.verify()?), 1);
    worker.running.kill(world)?;
    worker.running.delete(world)
}
