//! What to do next, from what is stored, what is published, and the time.
//!
//! ```text
//!  nothing of use ──> Make                            authority and certificate
//!  authorities not published ──> Publish              before anything is made that needs them
//!  certificate ends within 30 days ──> RenewLeaf      by the newest authority, published long ago
//!  authority ends within a year ──> RenewAuthority    the new one beside the old, whose certificate stays
//!  none of these ──> Rest
//! ```
//!
//! So no certificate is shown by an authority that API servers have just been told. The one
//! exception: an authority that nobody renewed in its last year, and that would end before a
//! certificate by it, is renewed first.

use time::{Duration, OffsetDateTime};

/// An authority is renewed when it has less time left.
pub const AUTHORITY_LEFT: Duration = Duration::days(365);
/// An authority with less time left signs nothing more: a certificate's whole life.
pub const AUTHORITY_USE: Duration = Duration::days(90);
/// A certificate is renewed when it has less time left.
pub const LEAF_LEFT: Duration = Duration::days(30);

/// What is stored, as far as it counts here.
#[derive(Clone, Copy, Debug)]
pub struct StoredCertificate {
    /// When the newest authority ends.
    pub authority_ends: OffsetDateTime,
    /// When the certificate ends; nothing when it is of no use: another name, another authority.
    pub leaf_ends: Option<OffsetDateTime>,
}

/// One write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// A new authority and a certificate by it, in place of whatever is there.
    Make,
    /// A new authority beside those that are there.
    RenewAuthority,
    /// The API server is told the authorities.
    Publish,
    /// A new certificate by the newest authority.
    RenewLeaf,
    /// Nothing.
    Rest,
}

/// The next step.
#[must_use]
pub fn next(
    stored: Option<&StoredCertificate>,
    published: bool,
    now: OffsetDateTime,
) -> RotationStep {
    let Some(stored) = stored.filter(|stored| stored.authority_ends > now) else {
        return RotationStep::Make;
    };
    let authority_left = stored.authority_ends - now;
    let leaf_due = stored.leaf_ends.is_none_or(|ends| ends - now < LEAF_LEFT);
    if authority_left < AUTHORITY_USE {
        RotationStep::RenewAuthority
    } else if !published {
        RotationStep::Publish
    } else if leaf_due {
        RotationStep::RenewLeaf
    } else if authority_left < AUTHORITY_LEFT {
        RotationStep::RenewAuthority
    } else {
        RotationStep::Rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_taken_when_it_is_due_and_in_this_order() {
        let now = OffsetDateTime::UNIX_EPOCH + Duration::days(20_000);
        let stored = |authority: i64, leaf: Option<i64>| StoredCertificate {
            authority_ends: now + Duration::days(authority),
            leaf_ends: leaf.map(|days| now + Duration::days(days)),
        };
        assert_eq!(next(None, true, now), RotationStep::Make);
        let table = [
            (stored(-1, Some(10)), true, RotationStep::Make),
            (stored(364, Some(80)), true, RotationStep::RenewAuthority),
            (stored(364, Some(29)), true, RotationStep::RenewLeaf),
            (stored(364, Some(29)), false, RotationStep::Publish),
            (stored(89, Some(29)), false, RotationStep::RenewAuthority),
            (stored(1000, Some(80)), false, RotationStep::Publish),
            (stored(1000, Some(1)), false, RotationStep::Publish),
            (stored(1000, Some(29)), true, RotationStep::RenewLeaf),
            (stored(1000, Some(-1)), true, RotationStep::RenewLeaf),
            (stored(1000, None), true, RotationStep::RenewLeaf),
            (stored(1000, Some(31)), true, RotationStep::Rest),
        ];
        for (stored, published, step) in table {
            assert_eq!(next(Some(&stored), published, now), step, "{stored:?} {published}");
        }
    }
}
