//! The time, which a test can hold and move on.

use std::time::{Duration, Instant};

/// The time now.
pub fn now() -> Instant {
    #[cfg(any(test, feature = "testing"))]
    if let Some(held) = HELD.get() {
        return held;
    }
    Instant::now()
}

/// How long ago something was.
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    /// The time of this thread, where a test holds it.
    static HELD: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// Holds the time of this thread: it passes by [`advance`] alone.
#[cfg(any(test, feature = "testing"))]
pub fn hold() {
    HELD.set(Some(Instant::now()));
}

/// Moves the time of this thread on, if it is held.
#[cfg(any(test, feature = "testing"))]
pub fn advance(by: Duration) {
    HELD.set(HELD.get().map(|held| held + by));
}
