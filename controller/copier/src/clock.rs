//! The clock of the copier. A test can stop and advance it.

use std::time::{Duration, Instant};

/// The current time, or the time at which a test has stopped the clock.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "testing"))]
    if let Some(held) = HELD.get() {
        return held;
    }
    Instant::now()
}

/// Duration from `then` until now.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// The time that a stopped clock shows. `None`: the clock runs.
    static HELD: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// Stops the clock of this thread: only [`advance`] moves it.
#[cfg(any(test, feature = "testing"))]
pub fn hold() {
    HELD.set(Some(Instant::now()));
}

/// Advances the clock of this thread, if it is stopped.
#[cfg(any(test, feature = "testing"))]
pub fn advance(by: Duration) {
    HELD.set(HELD.get().map(|held| held + by));
}
