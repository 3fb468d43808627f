//! Tests of the watcher, with GPUs that the tests change.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;

use super::*;
use crate::node::device_plugin::fake_kubelet::{cdi, health, reading};

/// The GPUs that the simulated driver reports. `None`: the driver reports an error.
type Driver = Arc<Mutex<Option<NodeGpus>>>;

struct Watched {
    driver: Driver,
    offer: watch::Sender<SeatOffer>,
    conditions: watch::Sender<Option<GpuConditions>>,
    /// The seats that pods have. `None`: the kubelet does not answer.
    taken: Arc<Mutex<Option<Vec<&'static str>>>>,
    seats: watch::Receiver<SeatList>,
    folder: tempfile::TempDir,
}

/// Runs `test` together with a watcher that reads these GPUs from a simulated driver.
async fn watched(uuids: &[&str], test: impl AsyncFnOnce(Watched)) {
    let folder = tempfile::tempdir().unwrap();
    let driver: Driver = Arc::new(Mutex::new(Some(reading(uuids))));
    let (offer, offered) = watch::channel(SeatOffer::default());
    let (sender, seats) = watch::channel(SeatList::default());
    let (conditions, conditions_of_gpus) = watch::channel(Some(GpuConditions::default()));
    let taken: Arc<Mutex<Option<Vec<&'static str>>>> = Arc::default();
    let answer = Arc::clone(&taken);
    let source = Arc::clone(&driver);
    let tick = Duration::from_millis(5);
    let watcher = SeatWatcher {
        read: async move || {
            let found = source.lock().unwrap_or_else(PoisonError::into_inner).clone();
            found.ok_or_else(|| HostError::Refused("NVML cannot be used".into()))
        },
        taken: async move || {
            let found = answer.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let found = found.ok_or(SeatUseError::Late)?;
            Ok(found.into_iter().map(str::to_owned).collect())
        },
        lookup: cdi(folder.path(), uuids),
        factor: OversubscriptionFactor::of_seats(2),
        offer: offered,
        conditions: conditions_of_gpus,
        seats: sender,
        pace: ReadPace { usual: tick, retry: tick },
    };
    tokio::select! {
        () = watcher.run() => panic!("the watcher ended"),
        () = test(Watched { driver, offer, conditions, taken, seats, folder }) => {}
    }
}

impl Watched {
    fn report(&self, gpus: Option<NodeGpus>) {
        *self.driver.lock().unwrap_or_else(PoisonError::into_inner) = gpus;
    }

    /// Reports the GPUs that are full.
    fn fill(&self, uuids: &[&str]) {
        let full = uuids.iter().map(|uuid| (*uuid).to_owned()).collect();
        self.conditions.send_replace(Some(GpuConditions { full, ..GpuConditions::default() }));
    }

    /// Sets the seats that pods have.
    fn take(&self, seats: Option<Vec<&'static str>>) {
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = seats;
    }

    async fn until(&mut self, expected: &[&str]) {
        let is_so = |seats: &SeatList| health(&seats.devices().devices) == expected;
        self.seats.wait_for(is_so).await.unwrap();
    }
}

const BOTH: [&str; 4] =
    ["GPU-a::0 Healthy", "GPU-a::1 Healthy", "GPU-b::0 Healthy", "GPU-b::1 Healthy"];
const LOST: [&str; 4] =
    ["GPU-a::0 Unhealthy", "GPU-a::1 Unhealthy", "GPU-b::0 Unhealthy", "GPU-b::1 Unhealthy"];

#[tokio::test]
async fn vanished_gpu_is_unhealthy_until_back() {
    watched(&["GPU-a", "GPU-b"], async |mut node| {
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&BOTH).await;
        node.report(Some(reading(&["GPU-a"])));
        node.until(&[BOTH[0], BOTH[1], LOST[2], LOST[3]]).await;
        node.report(Some(reading(&["GPU-a", "GPU-b"])));
        node.until(&BOTH).await;
        node.report(None);
        node.until(&LOST).await;
        node.report(Some(reading(&["GPU-a", "GPU-b"])));
        node.until(&BOTH).await;
    })
    .await;
}

#[tokio::test]
async fn full_gpu_offers_only_taken_seats() {
    watched(&["GPU-a", "GPU-b"], async |mut node| {
        node.take(Some(vec!["GPU-a::1", "GPU-b::0", "GPU-c::0", "no seat"]));
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&BOTH).await;
        node.fill(&["GPU-a"]);
        node.until(&[LOST[0], BOTH[1], BOTH[2], BOTH[3]]).await;
        node.take(Some(vec![]));
        node.until(&[LOST[0], LOST[1], BOTH[2], BOTH[3]]).await;
        node.fill(&[]);
        node.until(&BOTH).await;
    })
    .await;
}

/// The kubelet does not answer. The seats of its last answer stay offered. Without an answer since
/// the GPU became full, no seat of the GPU is offered.
#[tokio::test]
async fn full_gpu_is_closed_without_an_answer() {
    watched(&["GPU-a"], async |mut node| {
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&BOTH[..2]).await;
        node.fill(&["GPU-a"]);
        node.until(&LOST[..2]).await;
        node.take(Some(vec!["GPU-a::0"]));
        node.until(&[BOTH[0], LOST[1]]).await;
        node.take(None);
        node.report(Some(reading(&["GPU-a", "GPU-b"])));
        node.until(&[BOTH[0], LOST[1], LOST[2], LOST[3]]).await;
    })
    .await;
}

/// The agent has just started. Until the controller reports, a GPU may be full.
#[tokio::test]
async fn free_seats_wait_for_the_first_conditions() {
    watched(&["GPU-a", "GPU-b"], async |mut node| {
        node.conditions.send_replace(None);
        node.take(Some(vec!["GPU-a::1"]));
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&[LOST[0], BOTH[1], LOST[2], LOST[3]]).await;
        node.fill(&["GPU-a"]);
        node.until(&[LOST[0], BOTH[1], BOTH[2], BOTH[3]]).await;
    })
    .await;
}

/// A GPU is full. The kubelet is asked again and again, but the GPUs are read only once.
#[tokio::test]
async fn full_gpu_is_not_read_more_often() {
    let folder = tempfile::tempdir().unwrap();
    let (_offer, offered) = watch::channel(SeatOffer::Offered);
    let full = BTreeSet::from(["GPU-a".to_owned()]);
    let (_conditions, conditions) =
        watch::channel(Some(GpuConditions { full, ..GpuConditions::default() }));
    let (asked, mut questions) = watch::channel(0);
    let reads = std::cell::Cell::new(0);
    let watcher = SeatWatcher {
        read: async || {
            reads.set(reads.get() + 1);
            Ok(reading(&["GPU-a"]))
        },
        taken: async || {
            asked.send_modify(|count| *count += 1);
            Ok(BTreeSet::new())
        },
        lookup: cdi(folder.path(), &["GPU-a"]),
        factor: OversubscriptionFactor::of_seats(2),
        offer: offered,
        conditions,
        seats: watch::Sender::default(),
        pace: ReadPace { usual: Duration::from_secs(3600), retry: Duration::from_millis(1) },
    };
    tokio::select! {
        () = watcher.run() => panic!("the watcher ended"),
        reached = questions.wait_for(|count| *count >= 3) => drop(reached.unwrap()),
    }
    assert_eq!(reads.get(), 1);
}

#[tokio::test]
async fn seats_follow_what_the_node_serves() {
    watched(&["GPU-a", "GPU-b"], async |mut node| {
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&BOTH).await;
        node.offer.send_replace(SeatOffer::Withdrawn);
        node.until(&LOST).await;
        // The driver may be gone too.
        node.report(None);
        node.offer.send_replace(SeatOffer::Offered);
        node.report(Some(reading(&["GPU-a", "GPU-b"])));
        node.until(&BOTH).await;
    })
    .await;
}

#[tokio::test]
async fn gpu_without_cdi_device_is_unhealthy() {
    watched(&["GPU-a", "GPU-b"], async |mut node| {
        let spec = node.folder.path().join("nvidia.json");
        let text = std::fs::read(&spec).unwrap();
        std::fs::remove_file(&spec).unwrap();
        node.offer.send_replace(SeatOffer::Offered);
        node.until(&LOST).await;
        std::fs::write(&spec, text).unwrap();
        node.until(&BOTH).await;
    })
    .await;
}

#[tokio::test]
async fn seats_are_unknown_before_the_first_check() {
    for (offer, known) in [(SeatOffer::Undecided, false), (SeatOffer::Offered, true)] {
        let folder = tempfile::tempdir().unwrap();
        let (_offer, offered) = watch::channel(offer);
        let (seats, watched) = watch::channel(SeatList::default());
        let watcher = SeatWatcher {
            read: async || Ok(reading(&["GPU-a"])),
            taken: async || Ok(BTreeSet::new()),
            lookup: cdi(folder.path(), &["GPU-a"]),
            factor: OversubscriptionFactor::of_seats(2),
            offer: offered,
            conditions: watch::Sender::default().subscribe(),
            seats: seats.clone(),
            pace: ReadPace::default(),
        };
        assert!(watcher.run().now_or_never().is_none(), "it goes on");
        assert_eq!(watched.has_changed().unwrap(), known, "{offer:?}");
    }
}
