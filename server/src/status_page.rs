//! `/`: a page for people, in one file. It holds no figures itself: it asks `/v1/loads`, as anybody may
//! who has a key.

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};

const PAGE: &str = include_str!("status.html");
/// Nothing from elsewhere, and nobody may frame it.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; \
                      form-action 'none'";

/// The page.
pub(crate) async fn page() -> Response<Body> {
    let mut response = Response::new(Body::from(PAGE));
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
