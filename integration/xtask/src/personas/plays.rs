//! Plays a user of one machine, with any container engine.

use affinode_e2e::testbed::{MIB, Testbed};
use anyhow::{Context, Result, ensure};

use super::{
    document::{DocLine, Purpose},
    machine,
    shell::Shell,
};

/// Runs the commands of a user with one machine. The last step starts a container with a CUDA
/// program on a terminal. Checks that the idle program is offloaded, and that the documents'
/// commands then show it as offloaded. Then makes the program call CUDA again, and checks its
/// memory.
pub fn on_a_terminal(world: &Testbed, shell: &mut Shell<'_>, lines: &[DocLine]) -> Result<String> {
    let (steps, looks): (Vec<_>, Vec<_>) =
        lines.iter().partition(|line| line.purpose == Purpose::Step);
    let (container, earlier) = steps.split_last().context("there is no step")?;
    for line in earlier {
        shell.run(line)?;
    }
    let mut program = shell.start(container)?;
    program.expect("open")?;
    program.expect("fill")?;
    let rows = world.cli().ps()?.containers;
    let row = rows.first().context("affinode ps shows no container")?;
    let row = world.cli().wait_for_state(&row.id, "Offloaded")?;
    ensure!(row.offloaded_bytes >= machine::VRAM_MIB * MIB, "{row:?}");
    for line in looks {
        let said = shell.run(line)?;
        ensure!(said.contains(&row.name) && said.contains("Offloaded"), "{}: {said}", line.text);
    }
    program.enter("verify")?;
    let answer = program.expect("verify")?;
    ensure!(answer.ok == Some(true), "the program's GPU memory has changed");
    program.enter("quit")?;
    program.end()?;
    let mib = row.offloaded_bytes / MIB;
    Ok(format!("{} was idle and gave back {mib} MiB; its memory was as before", row.name))
}
