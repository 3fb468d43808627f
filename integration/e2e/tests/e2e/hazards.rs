//! Every hazard, without Affinode and with it: the table of `cargo xtask hazards`.

use affinode_e2e::{
    gpu::Gpu,
    hazards::{self, Options},
    world::{PLENTY_BYTES, Recipe},
};
use anyhow::Result;

#[test]
fn every_hazard_is_survived() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { gpu, filter: String::new(), turns: 10 };
    let report = hazards::run(&Recipe::default, &options, &mut |_| {})?;
    assert!(!report.failed(), "{}", report.table());
    // The hazards are real: without Affinode these kill, or lose.
    for (hazard, end) in [
        ("while away", "dies of a segmentation fault"),
        ("peer access between GPUs", "lost"),
        ("memory limit of 1 GiB, 4 GiB of VRAM", "is killed"),
        ("restore while VRAM is short", "lost"),
    ] {
        let mut rows = report.rows.iter().filter(|row| row.hazard.contains(hazard));
        let shown = rows.any(|row| row.without.contains(end));
        assert!(shown, "{hazard}: {}", report.table());
    }
    Ok(())
}
