//! A short crash campaign; `cargo xtask chaos` plays long ones.

use affinode_e2e::{
    chaos::{self, Options},
    gpu::Gpu,
    world::{PLENTY_BYTES, Recipe},
};
use anyhow::Result;

#[test]
fn ten_rounds_of_kills_lose_nobody() -> Result<()> {
    let gpu = Gpu::Simulated { vram_bytes: PLENTY_BYTES };
    let options = Options { seed: 1, first: 0, rounds: 10, gpu, worlds: 1 };
    let mut said = String::new();
    let report = chaos::run(&Recipe::default, &options, &mut |text| {
        said.push_str(text);
        said.push('\n');
    })?;
    assert!(!report.failed(), "{said}{}", report.table());
    let seen = [report.verified, report.wakes, report.together];
    assert!(!seen.contains(&0), "{}", report.table());
    Ok(())
}
