//! The clock by which the copier measures time. A test can stop and advance it.

use std::time::{Duration, Instant};

/// Returns the current time. While a test has stopped the clock, returns the time that the stopped
/// clock shows.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "testing"))]
    if let Some(held) = HELD.get() {
        return held;
    }
    Instant::now()
}

/// Returns the duration from `then` until now.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// Time that this thread's clock shows while a test has stopped it. `None` if the clock runs.
    static HELD: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// Stops the clock of this thread, so that only [`advance`] moves it.
#[cfg(any(test, feature = "testing"))]
pub fn hold() {
    HELD.set(Some(Instant::now()));
}

/// Advances the clock of this thread by a duration, if the clock is stopped.
#[cfg(any(test, feature = "testing"))]
pub fn advance(by: Duration) {
    HELD.set(HELD.get().map(|held| held + by));
}
