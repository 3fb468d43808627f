use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex};

use super::*;

#[test]
fn places_are_read_as_the_kernel_writes_them() {
    let text = b"202 0xb2e6bf8 0x189 0x0 0x0 0x0 0xffffffff 0x7efff000 0x7f0123\n";
    let place = ThreadLocation { call: 202, stack: 0x7eff_f000, code: 0x7f_0123 };
    assert_eq!(place_in(text), Some(place));
    for other in ["running\n", "-1 0x7eff 0x7f01\n", "", "202 0x1\n", "202 1 2 3 4 5 6 x y\n"] {
        assert_eq!(place_in(other.as_bytes()), None, "{other}");
    }
}

#[test]
fn files_of_the_driver_are_told_by_their_names() {
    for (path, code) in [
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", Code::Driver),
        ("/usr/lib/libnvidia-ml.so.1", Code::Driver),
        ("/opt/libcupti.so.13", Code::Driver),
        ("/usr/lib/libc.so.6", Code::Libc),
        ("/lib64/ld-linux-x86-64.so.2", Code::Libc),
        ("[vdso]", Code::Libc),
        ("/usr/lib/libcudart.so.13", Code::Other),
        ("/.affinode/lib/libaffinode_preload.so", Code::Other),
        ("", Code::Other),
    ] {
        assert_eq!(Code::of(path.as_bytes()), code, "{path}");
    }
}

#[test]
fn mapped_code_is_attributed_and_data_is_not() {
    let mut words: Words = [(0, None); STACK_WORDS + 1];
    let own = attribute as *const () as usize;
    let data = &raw const words as usize;
    (words[0].0, words[1].0, words[2].0) = (own, data, libc_function());
    assert!(attribute(&mut words));
    assert_eq!(words[0].1, Some(Code::Other));
    assert_eq!(words[1].1, None);
    assert_eq!(words[2].1, Some(Code::Libc));
    assert!(words[3..].iter().all(|(_, code)| code.is_none()));
}

fn libc_function() -> usize {
    crate::elf::find_function(b"pthread_create").unwrap()
}

/// A thread that sleeps on a condition variable.
struct Sleeper {
    tid: u32,
    wakes: Arc<(Mutex<bool>, Condvar)>,
    thread: std::thread::JoinHandle<()>,
}

impl Sleeper {
    fn start() -> Sleeper {
        let wakes = Arc::new((Mutex::new(false), Condvar::new()));
        let (tell, told) = mpsc::channel();
        let waits = Arc::clone(&wakes);
        let thread = std::thread::spawn(move || {
            tell.send(sys::gettid()).unwrap();
            let mut woken = waits.0.lock().unwrap();
            while !*woken {
                woken = waits.1.wait(woken).unwrap();
            }
        });
        let tid = told.recv().unwrap();
        let sleeps = || place_of(tid).is_some_and(|place| place.call == 202);
        while !sleeps() {
            std::thread::yield_now();
        }
        Sleeper { tid, wakes, thread }
    }

    fn end(self) {
        *self.wakes.0.lock().unwrap() = true;
        self.wakes.1.notify_all();
        self.thread.join().unwrap();
    }
}

#[test]
fn threads_asleep_elsewhere_are_no_alarm() {
    let sleeper = Sleeper::start();
    let place = place_of(sleeper.tid).unwrap();
    assert!(!is_inside_driver(place), "the thread sleeps in a test, not in the driver");
    let mut watch = BlockedThreadWatch::new();
    for _ in 0..5 {
        assert!(!watch.is_blocked(sleeper.tid));
    }
    sleeper.end();
    assert!(!watch.is_blocked(1), "thread 1 is not a thread of this process");
}

#[test]
fn thread_that_goes_on_is_recognised() {
    let sleeper = Sleeper::start();
    let (tid, place) = (sleeper.tid, place_of(sleeper.tid).unwrap());
    let mut watch = BlockedThreadWatch::new();
    watch.suspect = Some((tid, place, None));
    assert!(watch.has_blocked());
    // The process is resident, and the thread is still at the same place.
    assert!(!watch.settle(1_000_000));
    assert!(!watch.has_blocked(), "the process is not restored twice for this thread");
    assert!(!watch.settle(1_000_000 + GOES_ON_WITHIN_US));
    assert_eq!((watch.suspect, watch.false_alarms), (None, 1));
    assert!(watch.excused.contains(&(tid, place)));

    watch.suspect = Some((tid, place, None));
    sleeper.end();
    assert!(watch.settle(1_000_000));
    assert_eq!((watch.suspect, watch.false_alarms), (None, 1));
}

#[test]
fn too_many_false_alarms_end_the_watch() {
    let mut watch = BlockedThreadWatch::new();
    (0..MAX_FALSE_ALARMS).for_each(|tid| watch.excuse(tid, ThreadLocation::default()));
    watch.note();
    assert!(!watch.look(u64::MAX));
    assert_eq!(watch.switches, 0, "no thread was sampled");
}
