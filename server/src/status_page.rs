//! `/`: status page in one HTML file. The file contains no data; its script fetches `/v1/loads`, which
//! requires an API key if keys are configured.

use axum::body::Body;
use axum::http::{HeaderValue, Response, header};

const PAGE: &str = include_str!("status.html");
/// Content security policy: the page loads no external resources and cannot be embedded in frames.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; \
                      form-action 'none'";

/// Returns the status page.
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
