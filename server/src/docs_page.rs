//! `/docs`: a static HTML page that lists the routes of the OpenAPI document. The page has no script and
//! loads no other resource.

use super::openapi::document;
use axum::body::Body;
use axum::http::{HeaderValue, Response, header};
use serde_json::Value;
use std::fmt::Write as _;

/// Content security policy: allows only the inline style of the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; \
                      base-uri 'none'; form-action 'none'";
const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}\
                     table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;\
                     border-bottom:1px solid #8884}code{font-size:.95em}";

/// Returns the page.
pub(crate) async fn page() -> Response<Body> {
    let mut response = Response::new(Body::from(html(&document())));
    for (name, value) in [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Formats an OpenAPI document as an HTML page.
fn html(document: &Value) -> String {
    let text = |value: &Value| escaped(value.as_str().unwrap_or_default());
    let (title, version) = (text(&document["info"]["title"]), text(&document["info"]["version"]));
    let mut rows = String::new();
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            // Writing to a string cannot fail, so the result is ignored.
            let _ = write!(
                rows,
                "<tr><td>{}</td><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
                escaped(&method.to_uppercase()),
                escaped(path),
                text(&operation["summary"]),
                body_fields(document, operation)
            );
        }
    }
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title} {version}</title>\
         <style>{STYLE}</style></head><body><h1>{title} {version}</h1><p>The schemas of requests and replies \
         are in <a href=\"/openapi.json\">/openapi.json</a>.</p><table><thead><tr><th>Method</th>\
         <th>Route</th><th>Summary</th><th>Fields</th></tr></thead><tbody>{rows}</tbody></table></body></html>"
    )
}

/// Returns the field names of a request body.
fn body_fields(document: &Value, operation: &Value) -> String {
    let schema = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
    let name = schema.as_str().and_then(|name| name.rsplit('/').next()).unwrap_or_default();
    let properties = &document["components"]["schemas"][name]["properties"];
    let names = properties.as_object().into_iter().flatten().map(|(name, _)| escaped(name));
    names.collect::<Vec<_>>().join(", ")
}

/// Escapes text for HTML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_lists_every_route_without_scripts() {
        let document = document();
        let html = html(&document);
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.keys().all(|path| html.contains(&format!("<code>{}</code>", escaped(path)))));
        assert!(html.contains("max_completion_tokens") && !html.contains("<script"));
        assert!(!html.contains("http://") && !html.contains("https://"));
        assert_eq!(escaped("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
