//! Offloads programs of many kinds with each engine. Their results must be the same as without an
//! offload.

use super::{Report, Testbed, python::Python, repeated_offload::Flavour};
use crate::gpu::CONTAINER_LIBRARIES;

/// Python script that contains the programs. Its argument selects one of them.
const PROGRAM: &str = "programs.py";
/// Names of the programs in the report, and how each program is run.
const PROGRAMS: [(&str, Flavour); 7] = [
    (
        "transformers, a language model",
        // The program already has nearly 3 GiB of weights.
        Flavour { held_gib: 1, ..Flavour::small("llm", &[PROGRAM, "llm"]) },
    ),
    ("cuDNN, training with AdamW", Flavour::small("cudnn", &[PROGRAM, "cudnn"])),
    ("CUDA graph", Flavour::small("graph", &[PROGRAM, "graph"])),
    ("CuPy", Flavour::small("cupy", &[PROGRAM, "cupy"])),
    (
        "Triton",
        Flavour {
            // Triton searches the loader's cache for the driver. In the container this cache is the
            // machine's and does not list the driver's folder, so the folder is set here.
            settings: &[("TRITON_LIBCUDA_PATH", CONTAINER_LIBRARIES)],
            ..Flavour::small("triton", &[PROGRAM, "triton"])
        },
    ),
    ("four streams", Flavour::small("streams", &[PROGRAM, "streams"])),
    ("two processes", Flavour { processes: 2, ..Flavour::small("pair", &[PROGRAM, "pair"]) }),
];

/// Runs all programs. Each program is a separate part of the report.
pub fn all(world: &Testbed, report: &mut Report) {
    match Python::find(world) {
        Ok(python) => {
            for (part, flavour) in &PROGRAMS {
                report.part(world, part, |_, rows| flavour.side_by_side(&python, rows));
            }
        }
        Err(why) => report.skip("programs", &format!("{why:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_knows_all_kinds() {
        let source = include_str!("../../programs/programs.py");
        for (part, flavour) in PROGRAMS {
            assert_eq!((flavour.program.len(), flavour.program[0]), (2, PROGRAM), "{part}");
            assert!(source.contains(&format!("    {:?}: (", flavour.program[1])), "{part}");
        }
    }
}
