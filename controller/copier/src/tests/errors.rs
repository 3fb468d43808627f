//! Tests in which the simulated driver refuses each call in turn, with each class of error code.

use super::*;

/// Runs a whole offload and restore by the copier, from the memory file to the end of the fill.
/// Like a real agent, it stops when the copier closes the socket.
fn whole_life(testbed: &mut Testbed) -> Result<(), CopierError> {
    let mut agent = testbed.attach(1, COPIED_OUT_BYTES, 0);
    let file = content_file(&pattern(COPIED_OUT_BYTES, 1));
    agent.say(ToCopier::Prefaulted { bytes: COPIED_OUT_BYTES, uuid: fake::UUID }, Some(&file));
    testbed.settle()?;
    agent.copy_out(&pieces(&UNITS), REST_BYTES, None);
    take(&agent, &pieces(&UNITS));
    testbed.settle()?;
    agent.say(ToCopier::Checkpointed, None);
    testbed.settle()?;
    testbed.fill(1, COPIED_OUT_BYTES);
    agent.say(ToCopier::Restoring, None);
    testbed.settle()?;
    agent.say(ToCopier::Restored, None);
    testbed.settle()?;
    let received = agent.received();
    if received.iter().any(|(message, _)| *message == FromCopier::Filled) {
        let taken = full_of_units(&UNITS);
        assert!(content_of_blocks(&received) == taken, "it was told that all is there");
    }
    agent.hang_up();
    testbed.settle()?;
    Ok(())
}

fn calls_of_a_life() -> Vec<&'static str> {
    let mut testbed = Testbed::new();
    let before = fake::with(|fake| fake.calls().len());
    whole_life(&mut testbed).unwrap();
    fake::with(|fake| fake.calls()[before..].to_vec())
}

/// Driver calls that release something. If one of these calls fails, the memory is released only
/// when the copier's process ends.
const RELEASES: [&str; 7] = [
    "mem_release",
    "mem_unmap",
    "mem_address_free",
    "host_unregister",
    "event_destroy",
    "stream_synchronize",
    "stream_destroy",
];

#[test]
fn refused_call_leaves_nothing_of_its_process() {
    let calls = calls_of_a_life();
    assert!(calls.len() > 40, "{calls:?}");
    for (nth, call) in calls.iter().enumerate() {
        for code in [2, 999] {
            let why = format!("call {nth}, {call}, answers {code}");
            let mut testbed = Testbed::new();
            fake::with(|fake| fake.refuse(None, nth, code));
            let lived = whole_life(&mut testbed);
            // The copier ignores the result of the small allocation.
            let passes = code != 999 || RELEASES.contains(call) && *call != "host_unregister";
            match &lived {
                Ok(()) => assert_serves(&mut testbed),
                Err(error) => {
                    assert!(matches!(error, CopierError::Broken(_)), "{why}: {error}");
                    let must_end = !passes || *call == "host_unregister";
                    assert!(must_end, "{why}: the copier has ended");
                }
            }
            testbed.end();
            if RELEASES.contains(call) {
                assert_only_what_was_refused_is_left(call, &why);
            } else {
                testbed.assert_nothing_is_left();
            }
        }
    }
}

fn assert_only_what_was_refused_is_left(call: &str, why: &str) {
    let mut left = fake::with(|fake| fake.left());
    let of = match call {
        "mem_release" => &mut left.handles,
        "mem_address_free" => &mut left.reservations,
        "host_unregister" => &mut left.registrations,
        "event_destroy" => &mut left.events,
        "mem_unmap" => {
            // The address range cannot be released in this case.
            assert!(left.mappings <= 1 && left.reservations <= 1, "{why}: {left:?}");
            return;
        }
        _ => &mut left.streams,
    };
    assert!(*of <= 1, "{why}");
    *of = 0;
    assert_eq!(left, fake::Left::default(), "{why}");
}

/// Causes driver errors that leave the context unusable. The copier must then serve no process,
/// report no success and end, so that the controller starts another copier.
#[test]
fn sticky_error_ends_the_copier() {
    for (nth, call) in calls_of_a_life().iter().enumerate() {
        let why = format!("call {nth}, {call}, answers 700");
        let mut testbed = Testbed::new();
        fake::with(|fake| fake.refuse(None, nth, 700));
        let lived = whole_life(&mut testbed);
        let mut other = testbed.attach(2, COPIED_OUT_BYTES, 0);
        other.leave(&pieces(&UNITS), 0, &content_file(&pattern(COPIED_OUT_BYTES, 2)));
        let lived = lived.and_then(|()| testbed.settle().map(drop));
        assert!(matches!(lived, Err(CopierError::Broken(_))), "{why}: {lived:?}");
        assert!(!testbed.runs() && other.is_hung_up());
    }
}

/// Checks that host memory stays mapped if the driver refuses to unregister it. Otherwise another
/// process's memory could get these addresses, and the driver would copy that memory instead.
#[test]
fn memory_the_driver_keeps_stays_mapped() {
    let (mut testbed, mut agent, file) = reach(Stage::Held);
    fake::with(|fake| (0..9).for_each(|nth| fake.refuse(Some("host_unregister"), nth, 999)));
    agent.hang_up();
    assert!(matches!(testbed.settle(), Err(CopierError::Broken(_))));
    let inode = rustix::fs::fstat(&file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode)));
}

#[test]
fn context_is_refused_where_it_cannot_be_shared() {
    for (mode, is_refused) in [(0, false), (2, true), (3, true)] {
        fake::reset(VRAM_BYTES);
        fake::with(|fake| fake.compute_mode(mode));
        assert_eq!(fake::open().is_err(), is_refused, "compute mode {mode}");
    }
}

#[test]
fn context_that_the_driver_refuses_is_none() {
    fake::reset(VRAM_BYTES);
    fake::open().unwrap();
    let calls = fake::with(|fake| fake.calls().to_vec());
    for (nth, call) in calls.iter().enumerate() {
        fake::reset(VRAM_BYTES);
        fake::with(|fake| fake.refuse(None, nth, 999));
        let opened = fake::open();
        // If one of these calls fails, the copier continues. It then either does not know whether
        // other devices on the bus may access the memory, or has a context that keeps its local
        // memory.
        let may_fail =
            (nth == calls.len() - 4 && *call == "device_attribute") || *call == "ctx_set_limit";
        assert_eq!(opened.is_ok(), may_fail, "call {nth}, {call}");
    }
}
