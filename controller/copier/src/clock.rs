//! The clock, which a test can stop and advance.

use std::time::{Duration, Instant};

/// The current time, or the stopped one.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "testing"))]
    if let Some(held) = HELD.get() {
        return held;
    }
    Instant::now()
}

/// Time that has passed since `then`.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// The time at which a test has stopped the clock of this thread; `None`: the clock runs.
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
