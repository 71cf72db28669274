//! Background responses of the Responses API: the HTTP request returns at once, and the response is generated
//! afterwards.

use super::items::ResponseOutputItem;
use super::reply::{ResponseStatus, ResponsesReplyFormatter};
use crate::api_error::ApiError;
use crate::openai::collect::body_of;
use crate::openai::endpoint::{SubmittedRequest, json_response};
use crate::openai::generation::RequestGeneration;
use axum::body::Body;
use axum::http::Response;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Replies with a queued response and spawns a task that generates it. Aborting the task aborts the request
/// in the engine.
pub(super) fn start(
    prepared: SubmittedRequest<ResponsesReplyFormatter>,
) -> Result<Response<Body>, ApiError> {
    let SubmittedRequest { generation, reply, .. } = prepared;
    let body = body_of(&reply.body(ResponseStatus::Queued, &[], None))?;
    let (app, id, owner) = (Arc::clone(&reply.app), reply.id.clone(), reply.owner);
    let input = reply.input_items();
    let (stored, stored_rx) = oneshot::channel();
    let task = tokio::spawn(async move {
        // The task waits until the response is stored, so that it cannot finish a response that is not in the
        // store.
        if stored_rx.await.is_err() {
            return;
        }
        let result = run(&reply, generation).await;
        let (body, items) = result.unwrap_or_else(|error| failed(&reply, &error));
        reply.app.responses.finish(&reply.id, reply.finished(body, &items));
    });
    let background_task = task.abort_handle();
    if !app.responses.put_in_progress(owner, &id, body.clone(), input, background_task) {
        // `stored` is dropped on return. The task then ends, which aborts the request in the engine.
        let message = "the response is too large to be stored: send it without background";
        return Err(ApiError::invalid("background", message));
    }
    // The task owns the receiver, so sending fails only if the task has already ended.
    let _ = stored.send(());
    Ok(json_response(body))
}

async fn run(
    reply: &ResponsesReplyFormatter,
    mut generation: RequestGeneration,
) -> Result<(String, Vec<ResponseOutputItem>), ApiError> {
    generation.wait_first_event().await?;
    let body = body_of(&reply.body(ResponseStatus::InProgress, &[], None))?;
    reply.app.responses.update_in_progress(&reply.id, body);
    reply.finish(generation).await
}

fn failed(reply: &ResponsesReplyFormatter, error: &ApiError) -> (String, Vec<ResponseOutputItem>) {
    (body_of(&reply.failed(error, &[])).unwrap_or_default(), Vec::new())
}
