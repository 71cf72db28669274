//! What pages of other sites may do in a browser: nothing, unless the command line lets them.

use axum::http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{Any, CorsLayer};

/// Whom browsers let through. Empty lists of methods and headers mean what clients of this server send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorsConfig {
    /// Sites, or `*`.
    pub origins: Vec<String>,
    /// Methods, or `*`.
    pub methods: Vec<String>,
    /// Headers that may be sent, or `*`.
    pub headers: Vec<String>,
    /// Whether cookies and stored keys may come along; not with `*`.
    pub credentials: bool,
}

impl CorsConfig {
    /// The layer that answers browsers.
    ///
    /// Errors: the first name that no header may hold.
    pub fn layer(&self) -> Result<CorsLayer, String> {
        let all = |list: &[String]| list.iter().any(|name| name == "*");
        let shown = ["x-request-id", "x-hadron-ignored-fields", "retry-after"];
        let shown = shown.map(HeaderName::from_static);
        let mut layer = CorsLayer::new().allow_credentials(self.credentials).expose_headers(shown);
        layer = if all(&self.origins) {
            layer.allow_origin(Any)
        } else {
            layer.allow_origin(parsed::<HeaderValue>(&self.origins)?)
        };
        layer = if all(&self.methods) {
            layer.allow_methods(Any)
        } else {
            layer.allow_methods(parsed::<Method>(&or_default(
                &self.methods,
                &["GET", "POST", "DELETE", "HEAD"],
            ))?)
        };
        let usual = [
            "authorization",
            "content-type",
            "x-api-key",
            "x-request-id",
            "anthropic-version",
            "anthropic-beta",
        ];
        layer = if all(&self.headers) {
            layer.allow_headers(Any)
        } else {
            layer.allow_headers(parsed::<HeaderName>(&or_default(&self.headers, &usual))?)
        };
        Ok(layer)
    }
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
