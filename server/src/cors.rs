//! CORS: cross-origin access is denied unless the command line allows it.

use axum::http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{Any, CorsLayer};

/// Reply headers that scripts in a browser can read.
const EXPOSED_HEADERS: [&str; 3] = ["x-request-id", "x-hadron-ignored-fields", "retry-after"];
/// Methods that are allowed by default.
const DEFAULT_METHODS: [&str; 4] = ["GET", "POST", "DELETE", "HEAD"];
/// Request headers that are allowed by default.
const DEFAULT_HEADERS: [&str; 6] = [
    "authorization",
    "content-type",
    "x-api-key",
    "x-request-id",
    "anthropic-version",
    "anthropic-beta",
];

/// CORS settings. If `methods` or `headers` is empty, the defaults above are allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorsConfig {
    /// Allowed origins; `*` = all.
    pub origins: Vec<String>,
    /// Allowed methods; `*` = all.
    pub methods: Vec<String>,
    /// Allowed request headers; `*` = all.
    pub headers: Vec<String>,
    /// Whether requests may contain cookies and stored credentials; not allowed together with `*`.
    pub credentials: bool,
}

impl CorsConfig {
    /// Builds the CORS middleware.
    ///
    /// Errors: the first invalid origin, method or header name.
    pub fn layer(&self) -> Result<CorsLayer, String> {
        let exposed_headers = EXPOSED_HEADERS.map(HeaderName::from_static);
        let mut layer =
            CorsLayer::new().allow_credentials(self.credentials).expose_headers(exposed_headers);
        layer = if all(&self.origins) {
            layer.allow_origin(Any)
        } else {
            layer.allow_origin(parsed::<HeaderValue>(&self.origins)?)
        };
        layer = if all(&self.methods) {
            layer.allow_methods(Any)
        } else {
            layer.allow_methods(parsed::<Method>(&or_default(&self.methods, &DEFAULT_METHODS))?)
        };
        layer = if all(&self.headers) {
            layer.allow_headers(Any)
        } else {
            layer.allow_headers(parsed::<HeaderName>(&or_default(&self.headers, &DEFAULT_HEADERS))?)
        };
        Ok(layer)
    }
}

/// Whether a list contains `*`.
fn all(list: &[String]) -> bool {
    list.iter().any(|name| name == "*")
}

fn or_default(list: &[String], default: &[&str]) -> Vec<String> {
    if list.is_empty() {
        default.iter().map(|&name| name.to_owned()).collect()
    } else {
        list.to_vec()
    }
}

fn parsed<T: std::str::FromStr>(names: &[String]) -> Result<Vec<T>, String> {
    names.iter().map(|name| name.parse().map_err(|_| name.clone())).collect()
}
