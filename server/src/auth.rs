//! Authentication: API keys of clients and operators, compared as digests in constant time.
//!
//! The check is attached to the matched route and does not parse the path again, so an alternative spelling
//! of a path cannot bypass it.

use super::api_error::ApiError;
use super::app::AppState;
use super::routes::unknown_route;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::Next;
use axum::response::IntoResponse;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};

/// SHA-256 digest of an API key.
type ApiKeyDigest = [u8; 32];

/// Access that a route requires: which API key or listener, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteAccess {
    /// The route requires no key, because health probes must work without a secret.
    Open,
    /// The route requires a key only if `/metrics` is configured to require one.
    Metrics,
    /// The route requires a client key or an operator key, if client keys are configured.
    Key,
    /// The route is only for operators (operator key or admin listener).
    Admin,
    /// Like `Admin` if operator keys or an admin listener are configured, else like `Key`. The profiler
    /// routes exist only with `--profile DIR`.
    Profile,
}

/// Listener that accepted the connection of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// Listener of `--host` and `--port`, for clients.
    Public,
    /// Listener of `--admin-listen`.
    Admin,
}

/// Configured API keys of clients and operators, stored as digests. An operator key is also valid as a
/// client key.
#[derive(Clone, Default)]
pub struct ApiKeys {
    clients: Vec<ApiKeyDigest>,
    admins: Vec<ApiKeyDigest>,
}

impl ApiKeys {
    /// Stores the digests of the configured keys.
    pub fn new<'a>(
        clients: impl IntoIterator<Item = &'a str>,
        admins: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let digests = |keys: &mut dyn Iterator<Item = &'a str>| keys.map(digest).collect();
        Self {
            clients: digests(&mut clients.into_iter()),
            admins: digests(&mut admins.into_iter()),
        }
    }

    /// Whether client keys are configured.
    pub fn requires_client_key(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Whether operator keys are configured.
    pub fn has_admin_keys(&self) -> bool {
        !self.admins.is_empty()
    }

    /// Returns the identity of the caller. If no client keys are configured, all callers are anonymous.
    pub fn caller(&self, headers: &HeaderMap) -> CallerIdentity {
        CallerIdentity(presented_key(headers).filter(|_| self.requires_client_key()).map(digest))
    }

    fn is_admin(&self, key: &str) -> bool {
        contains_constant_time(&self.admins, &digest(key))
    }

    fn is_valid_key(&self, key: &str) -> bool {
        let digest = digest(key);
        contains_constant_time(&self.clients, &digest)
            | contains_constant_time(&self.admins, &digest)
    }
}

/// Digest of the API key that a caller sent. A stored response is visible only to the identity that created
/// it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct CallerIdentity(Option<ApiKeyDigest>);

impl CallerIdentity {
    /// Identity of a caller without a key, and of every caller if no key is required.
    pub const ANONYMOUS: Self = Self(None);
}

impl fmt::Debug for CallerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "CallerIdentity(key)"
        } else {
            "CallerIdentity(anonymous)"
        })
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({} client, {} admin)", self.clients.len(), self.admins.len())
    }
}

fn digest(key: &str) -> ApiKeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

/// Whether `keys` contains `key`. All keys are compared, so that the time does not depend on the position of
/// the match.
fn contains_constant_time(keys: &[ApiKeyDigest], key: &ApiKeyDigest) -> bool {
    keys.iter().fold(Choice::from(0), |found, candidate| found | candidate.ct_eq(key)).into()
}

/// Parameters of the authentication middleware of one route.
#[derive(Clone)]
pub(crate) struct RouteAuthParams {
    /// Application state, which contains the keys.
    pub app: Arc<AppState>,
    /// API key required by the route.
    pub access: RouteAccess,
    /// Listener that accepted the connection of the request.
    pub listener: ListenerKind,
}

/// Passes an authorised request to its route. Other requests get 401, or 404 as for an unknown route.
pub(crate) async fn authorize(
    State(guard): State<RouteAuthParams>,
    request: Request,
    next: Next,
) -> Response<Body> {
    match guard.check(request.method(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            let unauthorized = error.status == StatusCode::UNAUTHORIZED;
            let mut response = error.into_response();
            if unauthorized {
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
            }
            response
        }
    }
}

impl RouteAuthParams {
    fn check(&self, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
        let options = &self.app.options;
        let keys = &options.api_keys;
        let access = match self.access {
            RouteAccess::Metrics if options.metrics_require_key => RouteAccess::Key,
            RouteAccess::Metrics => RouteAccess::Open,
            RouteAccess::Profile if keys.has_admin_keys() || options.admin_listener => {
                RouteAccess::Admin
            }
            RouteAccess::Profile => RouteAccess::Key,
            access => access,
        };
        match (access, self.listener) {
            (RouteAccess::Admin, ListenerKind::Admin) if keys.has_admin_keys() => {
                require_key(headers, |key| keys.is_admin(key))
            }
            (RouteAccess::Admin, ListenerKind::Public) => {
                self.check_client(headers)?;
                presented_key(headers)
                    .filter(|key| keys.is_admin(key))
                    .map(drop)
                    .ok_or_else(unknown_route)
            }
            (RouteAccess::Open, _) => Ok(()),
            // A CORS preflight is allowed without a key: browsers send OPTIONS before the request that
            // contains the key.
            (RouteAccess::Key, _) if method == Method::OPTIONS => Ok(()),
            _ => self.check_client(headers),
        }
    }

    fn check_client(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let keys = &self.app.options.api_keys;
        if keys.requires_client_key() {
            require_key(headers, |key| keys.is_valid_key(key))
        } else {
            Ok(())
        }
    }
}

const KEY_REQUIRED_MESSAGE: &str =
    "this server requires an API key: send Authorization: Bearer KEY or x-api-key: KEY";

fn require_key(headers: &HeaderMap, is_valid: impl Fn(&str) -> bool) -> Result<(), ApiError> {
    let error = |reason, message| Err(ApiError::new(StatusCode::UNAUTHORIZED, reason, message));
    match presented_key(headers) {
        None => error("missing_key", KEY_REQUIRED_MESSAGE),
        Some(key) if is_valid(key) => Ok(()),
        Some(_) => error("wrong_key", "the API key is not valid"),
    }
}

/// Returns the API key of a request: `Authorization: Bearer KEY`, else `x-api-key: KEY`.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.trim().split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearer.or_else(|| text("x-api-key").map(str::trim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_compared_fully_and_redacted() {
        let keys = ApiKeys::new(["one", "two"], ["root"]);
        for (key, valid, admin) in [
            ("one", true, false),
            ("two", true, false),
            ("root", true, true),
            ("", false, false),
            ("on", false, false),
            ("onetwo", false, false),
        ] {
            assert_eq!((keys.is_valid_key(key), keys.is_admin(key)), (valid, admin), "{key}");
        }
        assert_eq!(format!("{keys:?}"), "ApiKeys(2 client, 1 admin)");
    }

    #[test]
    fn callers_are_distinguished_by_key() {
        let of = |keys: &ApiKeys, key: &'static str| {
            keys.caller(&HeaderMap::from_iter([(
                axum::http::HeaderName::from_static("x-api-key"),
                HeaderValue::from_static(key),
            )]))
        };
        let keys = ApiKeys::new(["one", "two"], []);
        assert_eq!(of(&keys, "one"), of(&keys, "one"));
        assert_ne!(of(&keys, "one"), of(&keys, "two"));
        assert_eq!(of(&ApiKeys::default(), "one"), of(&ApiKeys::default(), "two"));
        assert!(!format!("{:?}", of(&keys, "one")).contains("one"));
    }

    #[test]
    fn key_is_read_from_either_header() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            presented_key(&headers).map(str::to_owned)
        };
        assert_eq!(of(&[("authorization", "Bearer k")]).as_deref(), Some("k"));
        assert_eq!(of(&[("authorization", "bearer  k ")]).as_deref(), Some("k"));
        assert_eq!(of(&[("x-api-key", "k")]).as_deref(), Some("k"));
        assert_eq!(of(&[("authorization", "Basic a"), ("x-api-key", "k")]).as_deref(), Some("k"));
        assert_eq!(of(&[("authorization", "k")]), None);
        assert_eq!(of(&[]), None);
    }
}
