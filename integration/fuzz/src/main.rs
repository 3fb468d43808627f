//! Program that runs libFuzzer on one fuzz target. The variable `AFFINODE_FUZZ_TARGET` contains the
//! target's name. `cargo xtask fuzz` starts this program.
#![no_main]

use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();
    let run = TARGET.get_or_init(|| {
        let name = std::env::var("AFFINODE_FUZZ_TARGET").unwrap_or_default();
        affinode_fuzz::find(&name).unwrap_or_else(|| panic!("no target {name:?}"))
    });
    run(data);
});
