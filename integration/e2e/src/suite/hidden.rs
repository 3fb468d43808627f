//! Test of a hidden call, which reaches NVML or the driver without passing Affinode's hooks. A
//! process makes this call while its context is checkpointed. The call blocks until the process is
//! restored.

use anyhow::Result;

use super::{BY_ORDER, report::Rows};
use crate::{
    container::{CLIENTS, Spec},
    gpu::Gpu,
    testbed::Testbed,
    wait::until,
    worker::Worker,
};

const MIB: &str = "1024";

/// Makes a hidden call in an offloaded process. Affinode must report the call, and must restore the
/// process within seconds and with unchanged contents. From then on, no offload may checkpoint the
/// process's context.
pub fn hidden_call_restores(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let way = if matches!(world.gpu(), Gpu::Real) { "nvml" } else { "call" };
    for engine in ["checkpoint", "full"] {
        let id = format!("hidden-{engine}");
        let (name, value) = BY_ORDER;
        let spec = Spec::gpu(&id, &[&format!("{CLIENTS}/hidden"), way, MIB])
            .annotation(name, value)
            .annotation("affinode.io/engine", engine);
        let mut worker = Worker::start_as(world, spec)?;
        worker.expect("ready")?;
        world.cli().move_out(&id)?;
        let answer = worker.call("hidden")?;
        rows.tell(
            &format!("{engine}: a hidden call while offloaded returned after"),
            answer.elapsed_us as f64 / 1e6,
            "s",
        );
        let name = format!("default/{id}");
        let told = until("an event about the hidden call", || {
            let events = world.cli().events()?;
            let of_it = |e: &&crate::cli::EventRow| e.kind == "hidden-way" && e.container == name;
            let count = events.iter().filter(of_it).count();
            Ok((count > 0).then_some(count))
        })?;
        rows.count(&format!("{engine}: events that tell of it"), told, 1);
        let intact = usize::from(worker.verify()?);
        rows.count(&format!("{engine}: contents as before"), intact, 1);
        let said = world.cli().offload(&id)?;
        let kept = match engine {
            "checkpoint" => !said.done && said.reason == "hidden-way",
            _ => world.cli().known(&id)?.processes.iter().all(|p| p.phase == "CopiedOut"),
        };
        rows.count(&format!("{engine}: not checkpointed again"), usize::from(kept), 1);
        worker.call("hidden")?;
        let intact = usize::from(worker.verify()?);
        rows.count(&format!("{engine}: contents as before, next time"), intact, 1);
        worker.running.kill(world)?;
        worker.running.delete(world)?;
    }
    Ok(())
}
