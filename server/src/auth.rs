//! Who is let in: keys of clients and of operators, compared as digests in constant time.
//!
//! Decided by the route that was found, never by reading a path again, so that no spelling of a path
//! leads past it.

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

type ApiKeyDigest = [u8; 32];

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteAccess {
    /// Everyone: probes must not depend on a secret.
    Open,
    /// Everyone, unless scrapers need a key too.
    Metrics,
    /// Who has a key, if there are keys.
    Key,
    /// Operators.
    Admin,
    /// Operators if they are told apart, else as `Key`: `--profile DIR` asks for these routes.
    Profile,
}

/// The listener a request came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListenerKind {
    /// `--host` and `--port`.
    Public,
    /// `--admin-listen`.
    Admin,
}

/// Keys as digests: of clients, and of operators, who may do what clients may.
#[derive(Clone, Default)]
pub struct ApiKeys {
    clients: Vec<ApiKeyDigest>,
    admins: Vec<ApiKeyDigest>,
}

impl ApiKeys {
    /// Keys as they were given.
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

    /// Whether clients need one.
    pub fn guard_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Whether operators have one.
    pub fn guard_admins(&self) -> bool {
        !self.admins.is_empty()
    }

    /// Who sent these headers: everyone is the same where clients need no key.
    pub fn caller(&self, headers: &HeaderMap) -> CallerIdentity {
        CallerIdentity(presented_key(headers).filter(|_| self.guard_clients()).map(digest))
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

/// The key a client came with, as far as keys tell clients apart: what one stored, others do not find.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct CallerIdentity(Option<ApiKeyDigest>);

impl CallerIdentity {
    /// Whoever sends no key, or need not send one.
    pub const ANONYMOUS: Self = Self(None);
}

impl fmt::Debug for CallerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Caller(key)" } else { "Caller(anyone)" })
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({} of clients, {} of operators)", self.clients.len(), self.admins.len())
    }
}

fn digest(key: &str) -> ApiKeyDigest {
    Sha256::digest(key.as_bytes()).into()
}

/// Compares with every key, whichever fits.
fn contains_constant_time(keys: &[ApiKeyDigest], key: &ApiKeyDigest) -> bool {
    keys.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(key)).into()
}

/// What the guard of one route knows.
#[derive(Clone)]
pub(crate) struct RouteGuard {
    /// Holds the keys.
    pub app: Arc<AppState>,
    /// Whom the route is for.
    pub access: RouteAccess,
    /// Where the request came in.
    pub listener: ListenerKind,
}

/// Lets a request through to its route, or answers 401, or 404 as if there were no such route.
pub(crate) async fn authorize(
    State(door): State<RouteGuard>,
    request: Request,
    next: Next,
) -> Response<Body> {
    match door.check(request.method(), request.headers()) {
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

impl RouteGuard {
    fn check(&self, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
        let options = &self.app.options;
        let keys = &options.api_keys;
        let access = match self.access {
            RouteAccess::Metrics if options.metrics_require_key => RouteAccess::Key,
            RouteAccess::Metrics => RouteAccess::Open,
            RouteAccess::Profile if keys.guard_admins() || options.admin_listener => {
                RouteAccess::Admin
            }
            RouteAccess::Profile => RouteAccess::Key,
            access => access,
        };
        match (access, self.listener) {
            (RouteAccess::Admin, ListenerKind::Admin) if keys.guard_admins() => {
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
            // A browser asks what it may send before it sends a key.
            (RouteAccess::Key, _) if method == Method::OPTIONS => Ok(()),
            _ => self.check_client(headers),
        }
    }

    fn check_client(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let keys = &self.app.options.api_keys;
        if keys.guard_clients() {
            require_key(headers, |key| keys.is_valid_key(key))
        } else {
            Ok(())
        }
    }
}

const KEY_REQUIRED_MESSAGE: &str =
    "this server needs a key: send Authorization: Bearer KEY or x-api-key: KEY";

fn require_key(headers: &HeaderMap, fits: impl Fn(&str) -> bool) -> Result<(), ApiError> {
    let error = |reason, message| Err(ApiError::new(StatusCode::UNAUTHORIZED, reason, message));
    match presented_key(headers) {
        None => error("missing_key", KEY_REQUIRED_MESSAGE),
        Some(key) if fits(key) => Ok(()),
        Some(_) => error("wrong_key", "the key is not one of this server's"),
    }
}

/// The key of a request: `Authorization: Bearer KEY`, else `x-api-key: KEY`.
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
        for (key, known, admin) in [
            ("one", true, false),
            ("two", true, false),
            ("root", true, true),
            ("", false, false),
            ("on", false, false),
            ("onetwo", false, false),
        ] {
            assert_eq!((keys.is_valid_key(key), keys.is_admin(key)), (known, admin), "{key}");
        }
        assert_eq!(format!("{keys:?}"), "Keys(2 of clients, 1 of operators)");
    }

    #[test]
    fn callers_are_told_apart_by_key() {
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
    fn a_key_comes_in_either_header() {
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
