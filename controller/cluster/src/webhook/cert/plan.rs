//! Decides the next step of the certificate's rotation from the stored certificate, the published
//! authorities, and the time.
//!
//! ```text
//!  no valid content ──> Make                          authority and certificate
//!  authorities not published ──> Publish              before a certificate needs them
//!  certificate ends within 30 days ──> RenewLeaf      by the newest authority, published long ago
//!  authority ends within a year ──> RenewAuthority    adds one; the old one and its certificate stay
//!  none of these ──> Rest
//! ```
//!
//! API servers have therefore known an authority for a long time before it signs a certificate.
//! There is one exception. If the newest authority was not renewed in its last year, it may end in
//! less than the validity of a certificate. A new authority is then added first, and signs soon
//! after its publication.

use time::{Duration, OffsetDateTime};

/// Remaining validity below which an authority is renewed.
pub const AUTHORITY_LEFT: Duration = Duration::days(365);
/// Remaining validity below which an authority signs no further certificate. It is equal to the
/// whole validity of a certificate.
pub const AUTHORITY_USE: Duration = Duration::days(90);
/// Remaining validity below which a certificate is renewed.
pub const LEAF_LEFT: Duration = Duration::days(30);

/// Validity of the stored authority and certificate.
#[derive(Clone, Copy, Debug)]
pub struct StoredCertificate {
    /// End of the newest authority's validity.
    pub authority_ends: OffsetDateTime,
    /// End of the certificate's validity. `None`: the certificate is not usable. It is invalid, is
    /// for other names, or is signed by another authority.
    pub leaf_ends: Option<OffsetDateTime>,
}

/// The next step of the rotation: one write to the cluster, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationStep {
    /// Create an authority and a certificate that it signs. Both replace the stored content.
    Make,
    /// Add a new authority to the present ones.
    RenewAuthority,
    /// Publish the authorities to the API server.
    Publish,
    /// Create a new certificate, signed by the newest authority.
    RenewLeaf,
    /// Nothing is due at this time.
    Rest,
}

/// Returns the next step of the rotation. `stored` is the validity of the authority and certificate
/// in the Secret. `published` states whether the API server has all stored authorities.
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
    fn steps_come_when_due_and_in_order() {
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
