//! A cache of review results. Results expire, and the number of results is limited. The cache has
//! no clock: the caller passes the time.

use std::{collections::HashMap, hash::Hash, time::Duration};

use tokio::time::Instant;

/// Cached results by their key, each with the time at which it expires.
#[derive(Debug)]
pub struct ReviewCache<K, V> {
    most: usize,
    answers: HashMap<K, (V, Instant)>,
}

impl<K: Clone + Eq + Hash, V: Clone> ReviewCache<K, V> {
    /// Creates a cache of at most `most` results.
    pub fn new(most: usize) -> ReviewCache<K, V> {
        ReviewCache { most, answers: HashMap::new() }
    }

    /// Returns the cached result for a key, unless it has expired.
    pub fn get(&self, question: &K, now: Instant) -> Option<V> {
        let (answer, until) = self.answers.get(question)?;
        (*until > now).then(|| answer.clone())
    }

    /// Stores a result that expires after the time `holds`. If the cache is full, the result that
    /// expires first is removed. Results for invalid tokens expire first. They therefore do not
    /// displace results for valid tokens.
    pub fn keep(&mut self, question: K, answer: V, now: Instant, holds: Duration) {
        if self.answers.len() >= self.most && !self.answers.contains_key(&question) {
            self.answers.retain(|_, (_, until)| *until > now);
        }
        if self.answers.len() >= self.most && !self.answers.contains_key(&question) {
            let next = self.answers.iter().min_by_key(|(_, (_, until))| *until);
            if let Some(next) = next.map(|(question, _)| question.clone()) {
                self.answers.remove(&next);
            }
        }
        self.answers.insert(question, (answer, now + holds));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_expire_and_are_limited() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut cache = ReviewCache::new(3);
        cache.keep("known", true, start, 60 * second);
        assert_eq!(cache.get(&"known", start + 59 * second), Some(true));
        assert_eq!(cache.get(&"known", start + 60 * second), None);
        for rubbish in ["a", "b", "c", "d", "e"] {
            cache.keep(rubbish, false, start, 10 * second);
        }
        assert_eq!(cache.answers.len(), 3);
        assert_eq!(cache.get(&"known", start), Some(true), "rubbish does not push it out");
    }
}
