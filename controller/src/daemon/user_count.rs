//! Limits the number of connections that one user has to a socket, so that no user can keep the
//! others from connecting. The kernel states the user of a connection.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Number of open connections of each user, with its maximum for one user and for all users.
#[derive(Clone, Debug)]
pub(super) struct UserCount {
    users: Arc<Mutex<HashMap<u32, usize>>>,
    per_user: usize,
    in_all: usize,
}

impl UserCount {
    /// Creates a count without connections.
    pub(super) fn new(per_user: usize, in_all: usize) -> UserCount {
        UserCount { users: Arc::default(), per_user, in_all }
    }

    /// Adds a connection of a user to the count, and removes it when the returned value is dropped.
    /// Returns `None` if this user, or all users together, already have the maximum number of
    /// connections.
    pub(super) fn take(&self, uid: u32) -> Option<UserPlace> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = users.values().sum::<usize>() >= self.in_all;
        if is_full || users.get(&uid) >= Some(&self.per_user) {
            return None;
        }
        *users.entry(uid).or_default() += 1;
        Some(UserPlace { count: self.clone(), uid })
    }
}

/// A connection that is included in the count of its user. Dropping this value removes it from the
/// count.
#[derive(Debug)]
pub(super) struct UserPlace {
    count: UserCount,
    uid: u32,
}

impl Drop for UserPlace {
    fn drop(&mut self) {
        let mut users = self.count.users.lock().unwrap_or_else(PoisonError::into_inner);
        let left = users.get(&self.uid).map_or(0, |number| number - 1);
        match left {
            0 => drop(users.remove(&self.uid)),
            left => drop(users.insert(self.uid, left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_a_user_are_limited() {
        let count = UserCount::new(16, 128);
        let mut places: Vec<_> = (0..16).map(|_| count.take(1).unwrap()).collect();
        assert!(count.take(1).is_none());
        places.extend((2..).map_while(|uid| count.take(uid)));
        assert_eq!(places.len(), 128, "the connection of a further user is refused");
        drop(places.swap_remove(0));
        assert!(count.take(1).is_some() && count.take(2).is_some());
        drop(places);
        assert!(count.users.lock().unwrap().is_empty());
    }
}
