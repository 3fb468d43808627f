use super::*;

const GIB: f64 = (1_u64 << 30) as f64;

fn read(name: &str, text: &str) -> Result<Calibration, SimulationError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    Calibration::default().read(&path)
}

/// The default costs must agree with the figures of docs/figures.md, which are in GiB and
/// milliseconds. The tolerance is 12 %, because the costs are straight lines through the figures of
/// the first two sizes only.
#[test]
fn defaults_agree_with_the_figures() {
    let costs = Calibration::default();
    let is_near = |computed: Millis, measured: f64| {
        assert!((computed as f64 / measured - 1.0).abs() < 0.12, "{computed} and {measured}");
    };
    for (gib, out_ms, restore_ms) in [(1.0, 836.0, 456.0), (24.2, 10_200.0, 3_680.0)] {
        let bytes = (gib * GIB) as u64;
        is_near(costs.checkpoint.offload_ms(bytes), out_ms);
        is_near(costs.checkpoint.restore_ms(bytes), restore_ms);
    }
    for (gib, out_ms, restore_ms) in
        [(1.0, 23.0, 21.0), (24.2, 480.0, 470.0), (60.0, 1_200.0, 1_170.0)]
    {
        let bytes = (gib * GIB) as u64;
        is_near(costs.copy.offload_ms(bytes), out_ms);
        is_near(costs.copy.restore_ms(bytes), restore_ms);
    }
    for (gib, out_ms, restore_ms) in [(1.0, 374.0, 222.0), (24.2, 1_260.0, 510.0)] {
        let bytes = (gib * GIB) as u64;
        is_near(costs.copy.offload_ms(bytes) + costs.context_checkpoint_ms(bytes), out_ms);
        is_near(costs.full_restore_ms(bytes), restore_ms);
    }
    // A restore cannot be faster than its copy.
    is_near(costs.full_restore_ms((60.0 * GIB) as u64), 1_180.0);
}

#[test]
fn file_replaces_the_costs_of_its_engine() {
    let usual = Calibration::default();
    let text = "engine = \"copy\"\noffload_fixed_ms = 7\noffload_bytes_per_second = 2e9\n";
    let costs = read("calibration-copy.toml", text).unwrap();
    assert_eq!((costs.copy.offload_fixed_ms, costs.copy.offload_bytes_per_second), (7, 2e9));
    assert_eq!(costs.copy.restore_fixed_ms, usual.copy.restore_fixed_ms);
    assert_eq!((costs.checkpoint, costs.full), (usual.checkpoint, usual.full));
    let costs = read("a.json", r#"{"reload_fixed_ms": 9, "context_bytes": 5}"#).unwrap();
    assert_eq!((costs.reload_fixed_ms, costs.context_bytes), (9, 5));
}

#[test]
fn file_without_an_engine_is_refused() {
    for (text, named) in [
        ("offload_fixed_ms = 7\n", "engine = "),
        ("engine = \"auto\"\n", "auto"),
        ("engine = \"copy\"\nrestore_bytes_per_second = 5.0\n", "bytes per second"),
        ("speed = 1\n", "speed"),
    ] {
        let error = read("calibration.toml", text).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
