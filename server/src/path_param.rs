//! Extractor of the path parameter of a route; if it fails, the error has the JSON form of the API.

use super::api_error::ApiError;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;

/// Value of the path parameter of a route, percent-decoded.
pub(crate) struct PathParam(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathParam {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let part = Path::<String>::from_request_parts(parts, state).await;
        let rejection = |_| ApiError::invalid("", "the percent-decoded path is not UTF-8");
        part.map(|Path(part)| Self(part)).map_err(rejection)
    }
}
