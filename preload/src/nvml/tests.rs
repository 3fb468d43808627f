use affinode_proto::wire::message::GpuReading;

use super::answers::parse_uuid;
use super::cache::{self, BYTES};
use super::readings;
use super::waits::EventWaits;
use crate::sys;

#[test]
fn uuid_is_read_as_nvml_writes_it() {
    let read = parse_uuid(b"GPU-00010203-0405-0607-0809-0a0b0c0d0eff").unwrap();
    assert_eq!(read, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
    for bad in ["", "GPU-", "MIG-00010203-0405-0607-0809-0a0b0c0d0eff", "GPU-0001", "GPU-g"] {
        assert_eq!(parse_uuid(bad.as_bytes()), None, "{bad}");
    }
    assert_eq!(parse_uuid(b"GPU-00010203-0405-0607-0809-0a0b0c0d0eff00"), None);
}

#[test]
fn cache_gives_the_last_result_of_the_same_call() {
    let key = |arguments: &[u64], text: &[u8]| cache::key(70_000, arguments, text);
    let bytes = |byte| [byte; BYTES];
    assert!(cache::find(key(&[1], b"")).is_none());
    cache::store(key(&[1], b""), 0, &bytes(5));
    cache::store(key(&[2], b""), 3, &bytes(6));
    cache::store(key(&[], b"GPU-1"), 0, &bytes(7));
    cache::store(key(&[1], b""), 0, &bytes(8));
    let known = cache::find(key(&[1], b"")).unwrap();
    assert_eq!((known.result, known.bytes), (0, bytes(8)));
    assert_eq!(cache::find(key(&[2], b"")).unwrap().result, 3);
    assert_eq!(cache::find(key(&[], b"GPU-1")).unwrap().bytes, bytes(7));
    assert!(cache::find(key(&[], b"GPU-2")).is_none());
}

/// While one thread renews a cache entry, another thread that reads the entry must never see a
/// partly written result.
#[test]
fn cache_entry_is_never_seen_half_written() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let key = cache::key(70_001, &[], b"");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20_000_u32 {
                cache::store(key, round % 251, &[(round % 251) as u8; BYTES]);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        while !is_over.load(Ordering::Relaxed) {
            if let Some(known) = cache::find(key) {
                assert_eq!(known.bytes, [known.result as u8; BYTES]);
            }
        }
    });
    assert!(cache::find(key).is_some());
}

#[test]
fn readings_are_kept_by_device() {
    let reading = |byte: u8, free_bytes| GpuReading {
        uuid: [byte; 16],
        total_bytes: 100,
        free_bytes,
        reserved_bytes: 3,
        gpu_percent: 40,
        memory_percent: 9,
        temperature_c: 50,
        power_mw: 60_000,
    };
    readings::store(&reading(0xa1, 10));
    readings::store(&reading(0xa2, 20));
    readings::store(&reading(0xa1, 30));
    assert_eq!(readings::fresh(&[0xa1; 16], false), Some(reading(0xa1, 30)));
    assert_eq!(readings::fresh(&[0xa2; 16], true), Some(reading(0xa2, 20)));
    assert_eq!(readings::fresh(&[0xa3; 16], false), None);
}

#[test]
fn waits_of_threads_that_ended_do_not_count() {
    let waits = EventWaits::new();
    let own = sys::gettid();
    let dead = std::thread::spawn(sys::gettid).join().unwrap();
    while sys::thread_lives(dead) {
        std::thread::yield_now();
    }
    assert!(!waits.uncount(own) && !waits.has_any());
    assert!(waits.count(own) && waits.count(dead) && waits.count(own));
    assert!(waits.uncount(own) && waits.has_any());
    assert!(waits.uncount(own) && !waits.has_any());
    assert!(!waits.uncount(own) && !waits.uncount(dead), "all waits were removed before");
    // Threads for all entries. One of them waits several times.
    assert!((1..=32).all(|tid| waits.count(tid << 20)) && !waits.count(own));
    assert!(waits.count(1 << 20) && !waits.has_any() && waits.count(own));
}
