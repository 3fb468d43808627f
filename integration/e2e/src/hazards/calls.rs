//! Five CUDA calls that crash a process while its GPU state is checkpointed. With Affinode, each
//! call must wait until the process is restored, and then return.

use anyhow::{Result, ensure};

use super::{Case, Found, manual_ops::Held};
use crate::{
    container::{CLIENTS, Spec},
    testbed::Testbed,
    worker::Worker,
};

const CALLS: [(&str, &str); 5] = [
    ("cuCtxSynchronize while offloaded", "ctx-sync"),
    ("cuStreamSynchronize while offloaded", "stream-sync"),
    ("cuStreamQuery while offloaded", "stream-query"),
    ("cuEventQuery while offloaded", "event-query"),
    ("cuEventSynchronize while offloaded", "event-sync"),
];

pub fn cases() -> Vec<Case> {
    CALLS.iter().map(|(name, call)| Case::new(name, move |world| play(world, call))).collect()
}

fn play(world: &Testbed, call: &str) -> Result<Found> {
    let spec = || Spec::gpu(call, &[&format!("{CLIENTS}/crashers"), call]);
    let mut bare = Held::bare(world, spec())?;
    bare.worker.expect("ready")?;
    ensure!(
        bare.tool(world, &["lock", "checkpoint"])? == [0, 0],
        "the tool cannot lock and checkpoint the process"
    );
    bare.worker.send("go")?;
    let (_, without) = bare.end()?;

    let mut worker = Worker::start_as(world, spec())?;
    worker.expect("ready")?;
    world.cli().move_out(call)?;
    let answer = worker.call("go")?;
    ensure!(answer.ok == Some(true), "the memory of the process has changed: {answer:?}");
    Ok(Found::Row { without, with: "returns; contents intact".into() })
}
