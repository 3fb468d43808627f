//! Checks HTTP clients' tokens with the Kubernetes API server, like kube-rbac-proxy. A TokenReview
//! identifies the user. Then a SubjectAccessReview on a non-resource URL checks the user's right.
//!
//! ```text
//!  token ──well formed──> users ──unknown──> TokenReview ──┬── invalid: refused
//!                         [`cache`]                        v
//!                         rights ──unknown──> SubjectAccessReview ──┬── no: forbidden
//!                                                                   v
//!                                                                admitted
//! ```
//!
//! Results are cached for a short time, positive results longer than negative results. If the API
//! server cannot be reached, only requests with a cached result are admitted.

mod api;
mod cache;
#[cfg(test)]
pub mod fake;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::guard::{AccessRule, Denied, DenyReason};
use crate::config::KubernetesSection;
use api::{ApiServer, ReviewError, User};
use cache::ReviewCache;

/// Time for which a positive review result is cached. A deleted user has access for at most this
/// time.
pub const ALLOW_TTL: Duration = Duration::from_secs(60);
/// Time for which a negative review result is cached.
const NO: Duration = Duration::from_secs(10);
/// Maximum number of cached tokens, and of cached rights.
const REMEMBERED: usize = 256;
/// Maximum length of a token in bytes. Kubernetes tokens are shorter.
const TOKEN_BYTES: usize = 8 << 10;

/// Reviews tokens with the Kubernetes API server, and caches the results.
#[derive(Debug)]
pub struct TokenReviewer {
    server: ApiServer,
    known: Mutex<ReviewedToken>,
}

#[derive(Debug)]
struct ReviewedToken {
    /// User of each token, by the token's hash. The user is `None` if the token is invalid.
    users: ReviewCache<TokenHash, Option<Arc<User>>>,
    /// Whether the user of a token has a right, by the token's hash and the right.
    rights: ReviewCache<(TokenHash, AccessRule), bool>,
}

type TokenHash = [u8; 32];

impl TokenReviewer {
    /// Creates a reviewer that uses the API server of this configuration. The files that the
    /// configuration names are read for each request.
    ///
    /// # Errors
    /// The configuration is invalid. The error names the accepted values.
    pub fn new(section: &KubernetesSection) -> Result<TokenReviewer, String> {
        let known = ReviewedToken {
            users: ReviewCache::new(REMEMBERED),
            rights: ReviewCache::new(REMEMBERED),
        };
        Ok(TokenReviewer { server: ApiServer::new(section)?, known: Mutex::new(known) })
    }

    /// Checks that the user of a token has a right, and returns the user's name.
    ///
    /// # Errors
    /// [`Denied`]: the token is invalid, the user lacks the right, or the API server does not
    /// respond.
    pub async fn admit(&self, token: &[u8], access: AccessRule) -> Result<String, Denied> {
        let unknown =
            || Denied::new(DenyReason::Token, "the API server does not accept this token");
        let token = well_formed(token).ok_or_else(unknown)?;
        let hash: TokenHash = Sha256::digest(token).into();
        let cannot = |error| cannot_ask(&error);
        let user = self.user(hash, token).await.map_err(cannot)?.ok_or_else(unknown)?;
        if self.may(hash, &user, access).await.map_err(cannot)? {
            return Ok(user.username.clone());
        }
        let AccessRule { verb, path } = access;
        let why = format!(
            "{} may not {verb} {path}: bind a ClusterRole that lists this verb and this path \
             (nonResourceURLs)",
            user.username
        );
        Err(Denied::new(DenyReason::Forbidden, why))
    }

    async fn user(&self, hash: TokenHash, token: &str) -> Result<Option<Arc<User>>, ReviewError> {
        if let Some(known) = self.known().users.get(&hash, Instant::now()) {
            return Ok(known);
        }
        let user = self.server.whose(token).await?.map(Arc::new);
        let holds = if user.is_some() { ALLOW_TTL } else { NO };
        self.known().users.keep(hash, user.clone(), Instant::now(), holds);
        Ok(user)
    }

    async fn may(
        &self,
        hash: TokenHash,
        user: &User,
        access: AccessRule,
    ) -> Result<bool, ReviewError> {
        let what = (hash, access);
        if let Some(known) = self.known().rights.get(&what, Instant::now()) {
            return Ok(known);
        }
        let may = self.server.may(user, access).await?;
        let holds = if may { ALLOW_TTL } else { NO };
        self.known().rights.keep(what, may, Instant::now(), holds);
        Ok(may)
    }

    fn known(&self) -> MutexGuard<'_, ReviewedToken> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the token as text if it has the form of RFC 6750 and a plausible length. Returns `None`
/// otherwise. The request is then refused without asking the API server.
fn well_formed(token: &[u8]) -> Option<&str> {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-._~+/=".contains(b);
    let fine = (1..=TOKEN_BYTES).contains(&token.len()) && token.iter().all(plain);
    std::str::from_utf8(token).ok().filter(|_| fine)
}

/// Returns the refusal of a request whose token cannot be checked. The reason is written only to
/// the log, not into the response.
fn cannot_ask(error: &ReviewError) -> Denied {
    let why = "tokens cannot be checked now; try again (the controller's log has the reason)";
    Denied { detail: crate::error_chain::chain(error), ..Denied::new(DenyReason::Review, why) }
}
