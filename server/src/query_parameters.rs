//! Query parameters of a request.

use super::api_error::ApiError;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use serde::Deserialize;

/// One `name=value` pair of a query.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct QueryParameter {
    pub(crate) name: String,
    pub(crate) value: String,
}

/// Query as extracted from a request, for `query_parameters`.
pub(crate) type ExtractedQuery = Result<Query<Vec<QueryParameter>>, QueryRejection>;

/// Returns the parameters of a query in their order.
///
/// Errors: HTTP status 400 if the query is not `name=value` pairs.
pub(crate) fn query_parameters(query: ExtractedQuery) -> Result<Vec<QueryParameter>, ApiError> {
    match query {
        Ok(Query(parameters)) => Ok(parameters),
        Err(_) => Err(ApiError::invalid("query", "is not name=value pairs in UTF-8")),
    }
}
