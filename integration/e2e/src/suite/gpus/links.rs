//! Runs the program `links` with the stock runtime. The program measures copies from host memory to
//! each GPU, to both GPUs at the same time, and to one GPU through the other GPU. It also releases
//! memory that both GPUs or two processes map, creates it again at the same address, and checks the
//! contents.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::super::{Rows, Testbed};
use crate::{
    container::{CLIENTS, Spec},
    containerd::STOCK,
    gpu::Gpu,
};

pub const PART: &str = "gpus, links";

/// A line that the program `links` prints.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    /// Result of a check of memory contents.
    Check {
        what: String,
        ok: bool,
    },
    Figure {
        what: String,
        value: f64,
        unit: String,
    },
}

/// Runs the program `links` without Affinode. Adds its measured values and the results of its
/// checks to `rows`.
///
/// # Errors
/// When the program fails.
pub fn without_affinode(world: &Testbed, rows: &mut Rows) -> Result<()> {
    let (copied_mib, shared_mib) = match world.gpu() {
        Gpu::Real => ("24576", "8192"),
        Gpu::Simulated { .. } => ("64", "64"),
    };
    for (action, mib) in [("copy", copied_mib), ("remap", shared_mib), ("import", shared_mib)] {
        let id = format!("links-{action}");
        let spec = Spec::gpu(&id, &[&format!("{CLIENTS}/links"), action, mib]);
        let text = spec.runtime(STOCK).run(world)?;
        for line in text.lines() {
            let line: Line = serde_json::from_str(line)
                .with_context(|| format!("cannot parse the output of links: {line}"))?;
            let named = |what: &str| format!("{action}, {mib} MiB: {what}");
            match line {
                Line::Check { what, ok } => rows.count(&named(&what), usize::from(ok), 1),
                Line::Figure { what, value, unit } => {
                    let known = ["ms", "GB/s", "MiB"].into_iter().find(|known| *known == unit);
                    rows.tell(&named(&what), value, known.context("an unknown unit")?);
                }
            }
        }
    }
    Ok(())
}
