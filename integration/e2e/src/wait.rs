//! Functions that wait for a condition. Their time limits are long, because a wait must not fail on
//! a slow machine.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Time limit of a wait. It is far longer than a healthy machine needs, so a test that reaches it
/// has failed.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `probe` repeatedly until it returns a value, and returns that value.
///
/// # Errors
/// When the probe fails, or [`WAIT_TIMEOUT`] has passed. `what` completes the error "waited for …".
pub fn until<T>(what: &str, probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(WAIT_TIMEOUT, what, probe)
}

/// Like [`until`], but with the caller's time limit, for waits that may take longer than
/// [`WAIT_TIMEOUT`] on a healthy machine.
///
/// # Errors
/// When the probe fails, or the time limit has passed.
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
