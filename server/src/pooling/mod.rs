//! Routes of a server with `--runner pooling`: embeddings, scores of text pairs, and reranking.
//!
//! A pooling request has no output tokens: the engine returns one vector per prompt. An embedding model
//! scores a pair by the cosine similarity of the two embeddings; a reranker scores it with one prompt that
//! contains both texts.

mod embedding_reply;
mod embeddings;
mod pair_scores;
mod pooler_settings;
mod prompts;
mod rerank;
mod score;
mod text_pairs;
mod vectors;

pub use pooler_settings::{MatryoshkaDimensions, PoolerSettings, PoolingTask};

use super::api_error::ApiError;
use super::app::AppState;
use super::openai::choice::ChoiceDelta;
use super::openai::endpoint;
use super::openai::generation::RequestGeneration;
use super::openai::params::FieldBounds;
use super::request_fields::RequestFields;
use super::sse::SseEventWriter;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Response;
use bytes::BytesMut;
use embeddings::{EmbeddingReplyFormatter, EmbeddingRequest};
use rerank::RerankReplyFormatter;
use score::ScoreReplyFormatter;
use std::sync::Arc;

/// Maximum number of prompts of one request, as in OpenAI's API.
pub const PROMPTS_MAX: usize = 2048;

/// Handles POST `/v1/embeddings`.
pub(crate) async fn embeddings(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<EmbeddingReplyFormatter>(app, request).await
}

/// Handles POST `/score`.
pub(crate) async fn score(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<ScoreReplyFormatter>(app, request).await
}

/// Handles POST `/rerank`.
pub(crate) async fn rerank(
    State(app): State<Arc<AppState>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    endpoint::serve::<RerankReplyFormatter>(app, request).await
}

/// Validates the fields of an embedding request.
pub(crate) fn check_embeddings(
    fields: &mut RequestFields,
    bounds: &FieldBounds,
) -> Result<(), ApiError> {
    EmbeddingRequest::take(fields, bounds).map(|_| ())
}

/// Chunk writer type for pooling replies. The type has no values, because pooling replies are not streamed.
pub(crate) enum NoStreamWriter {}

impl SseEventWriter for NoStreamWriter {
    fn delta(
        &mut self,
        _choice: u32,
        _delta: &ChoiceDelta,
        _generation: &RequestGeneration,
        _out: &mut BytesMut,
    ) {
        match *self {}
    }

    fn end(&mut self, _generation: &RequestGeneration, _out: &mut BytesMut) {
        match *self {}
    }
}
