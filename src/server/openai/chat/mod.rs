//! POST `/v1/chat/completions`, and what it shares with the other endpoints that hold conversations.

mod convert;
pub mod messages;
mod reply;
pub mod start;
mod stream;
pub mod tools;
pub mod types;

use super::exchange;
use crate::server::app::App;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::server::openai::params::{Bounds, Defaults};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use reply::Reply;
use std::sync::Arc;
use types::ChatRequest;

/// Fields under which clients find reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReasoningField {
    /// Both of the following.
    #[default]
    Both,
    /// `reasoning`, the name of today.
    Reasoning,
    /// `reasoning_content`, the older one.
    ReasoningContent,
}

impl ReasoningField {
    /// The names of the fields.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Both => &["reasoning", "reasoning_content"],
            Self::Reasoning => &["reasoning"],
            Self::ReasoningContent => &["reasoning_content"],
        }
    }
}

/// Answers one request.
pub async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    exchange::serve::<Reply>(app, request).await
}

/// Whether a body would be taken, as far as its fields alone decide.
///
/// Errors: 400 naming the field.
pub fn check(fields: &mut Fields, bounds: &Bounds, defaults: &Defaults) -> Result<(), ApiError> {
    ChatRequest::take(fields, bounds, defaults).map(|_| ())
}
