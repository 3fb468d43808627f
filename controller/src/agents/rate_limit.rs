//! Rate limits of one container, which apply to all of its connections together.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Rate limit of the messages that the controller reads from a container: size of a burst, then
/// number per second. Further messages wait in the container's sockets.
const MESSAGES: (u32, u32) = (2_000, 1_000);
/// Rate limit of the connections of a container: size of a burst, then number per second. The burst
/// is large, because all processes of a large container may start at the same time.
const CONNECTIONS: (u32, u32) = (512, 50);
/// Rate limit of the log lines about refused processes: size of a burst, then number per second.
const REFUSALS: (u32, u32) = (8, 1);

/// A rate limit (token bucket). It stores only the time at which the bucket will be full again if
/// no further token is taken.
#[derive(Debug)]
pub struct RateLimit {
    ahead: Duration,
    interval: Duration,
    paid: Mutex<Instant>,
}

impl RateLimit {
    /// Creates a limit: size of a burst, then number per second.
    pub fn new((at_once, per_second): (u32, u32)) -> RateLimit {
        let interval = Duration::from_secs(1) / per_second;
        let ahead = interval * at_once;
        RateLimit { ahead, interval, paid: Mutex::new(Instant::now()) }
    }

    /// Takes one token, and waits until it is available.
    pub async fn take(&self) {
        let paid = {
            let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
            *paid = (*paid).max(Instant::now()) + self.interval;
            *paid
        };
        tokio::time::sleep_until(paid - self.ahead).await;
    }

    /// Takes one token if one is available now, and never waits. Returns whether a token was taken.
    pub fn try_take(&self) -> bool {
        let now = Instant::now();
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        let next = (*paid).max(now) + self.interval;
        let there = next <= now + self.ahead;
        if there {
            *paid = next;
        }
        there
    }

    /// Whether no token is missing, so that the limit equals a new one.
    pub fn is_full(&self) -> bool {
        *self.paid.lock().unwrap_or_else(PoisonError::into_inner) <= Instant::now()
    }
}

/// The rate limits of one container.
#[derive(Debug)]
pub struct RateLimits {
    /// Rate limit of the messages that the controller reads.
    pub messages: RateLimit,
    /// Rate limit of the connections that the controller accepts.
    pub connections: RateLimit,
    /// Limit of the log lines about refused processes.
    pub refusals: RefusalLog,
}

/// Limits the log lines about refused processes. Refusals above the rate are only counted. The next
/// log line states their number.
#[derive(Debug)]
pub struct RefusalLog {
    budget: RateLimit,
    unlogged: Mutex<u64>,
}

impl Default for RefusalLog {
    fn default() -> RefusalLog {
        RefusalLog { budget: RateLimit::new(REFUSALS), unlogged: Mutex::new(0) }
    }
}

impl RefusalLog {
    /// Returns the text to log for one refusal, or `None` if the rate limit is reached. The text
    /// states how many refusals before it were not logged.
    pub fn tell(&self, why: String) -> Option<String> {
        let mut unlogged = self.unlogged.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.budget.try_take() {
            *unlogged += 1;
            return None;
        }
        match std::mem::take(&mut *unlogged) {
            0 => Some(why),
            more => Some(format!("{why} ({more} earlier refusals were not logged)")),
        }
    }
}

impl RateLimits {
    /// Creates the limits of a container that has not used any tokens yet.
    pub fn new() -> RateLimits {
        RateLimits {
            messages: RateLimit::new(MESSAGES),
            connections: RateLimit::new(CONNECTIONS),
            refusals: RefusalLog::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tokens_beyond_the_burst_wait() {
        let budget = RateLimit::new((10, 5));
        let began = Instant::now();
        for _ in 0..10 {
            budget.take().await;
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(!budget.try_take());
        for _ in 0..20 {
            budget.take().await;
        }
        assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
        // Time refills the bucket, but not above the burst.
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..100).filter(|_| budget.try_take()).count(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn further_refusals_are_counted() {
        let refusals = RefusalLog::default();
        let told = (0..1_000).filter_map(|_| refusals.tell("noise".into())).count();
        assert_eq!(told, 8);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(
            refusals.tell("noise".into()).unwrap(),
            "noise (992 earlier refusals were not logged)"
        );
    }
}
