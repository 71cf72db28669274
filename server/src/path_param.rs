//! Extractors of route path parameters; extraction errors have the JSON form of the API.

use super::api_error::ApiError;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;

/// Value of a route's path parameter, percent-decoded.
pub(crate) struct PathParam(pub String);

/// Ids of an object and of one of its items, percent-decoded.
pub(crate) struct ItemPathParams {
    /// Id of the object.
    pub id: String,
    /// Id of the item.
    pub item_id: String,
}

impl<S: Send + Sync> FromRequestParts<S> for PathParam {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let part = Path::<String>::from_request_parts(parts, state).await;
        part.map(|Path(part)| Self(part)).map_err(|_| not_utf8())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ItemPathParams {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let ids = Path::<(String, String)>::from_request_parts(parts, state).await;
        ids.map(|Path((id, item_id))| Self { id, item_id }).map_err(|_| not_utf8())
    }
}

fn not_utf8() -> ApiError {
    ApiError::invalid("", "the percent-decoded path is not UTF-8")
}
