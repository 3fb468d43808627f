//! Waits for a condition, with a deadline that says nothing about speed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Far longer than a healthy machine needs: reaching it is a failure, not a measurement.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Probes until the condition holds, and returns the probe's value.
///
/// # Errors
/// When the probe fails, or [`WAIT_TIMEOUT`] is over; `what` completes "waited for …".
pub fn until<T>(what: &str, probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(WAIT_TIMEOUT, what, probe)
}

/// Like [`until`], where a healthy machine may need longer than [`WAIT_TIMEOUT`].
///
/// # Errors
/// When the probe fails, or the time is over.
pub fn until_within<T>(
    patience: Duration,
    what: &str,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        let seen = probe().with_context(|| format!("while waiting for {what}"))?;
        if let Some(found) = seen {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("waited {} s in vain for {what}", patience.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
