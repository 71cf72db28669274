//! Probe `/health_generate`: generates one token through the engine, with a deadline.

use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::collect::collect;
use crate::openai::completions;
use crate::openai::endpoint::HeaderParams;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use axum::extract::State;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Deadline of the probe, as in SGLang.
const DEADLINE: Duration = Duration::from_secs(20);
/// Interval at which the probe checks whether other requests got tokens.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Reasons of rejections for load.
const OVERLOAD_REASONS: [&str; 4] =
    ["max_num_queued_reqs", "max_num_queued_tokens", "max_queued_bytes", "text_memory"];

/// Handles `/health_generate`: succeeds once the engine has generated a token, for the probe or, if the engine
/// is busy, for another request. At most one probe is in the engine; others wait for their turn.
pub(crate) async fn health_generate(State(app): State<Arc<AppState>>) -> Result<(), ApiError> {
    let serving = Arc::clone(app.accepting()?);
    let generated = timeout(DEADLINE, async {
        let _turn = app.generation_probe.lock().await;
        let before = generated_tokens(&serving);
        tokio::select! {
            result = one_token(&app, &serving) => match result {
                Ok(()) => Ok(()),
                // An overloaded server rejects the probe; it is healthy if other requests make progress.
                Err(error) if OVERLOAD_REASONS.contains(&error.reason) => {
                    other_progress(&serving, before).await;
                    Ok(())
                }
                Err(error) => Err(error),
            },
            () = other_progress(&serving, before) => Ok(()),
        }
    });
    generated.await.unwrap_or_else(|_| {
        let message = format!("no token was generated within {} s", DEADLINE.as_secs());
        Err(ApiError::unavailable("engine_unavailable", &message, 10))
    })
}

/// Generates one token.
async fn one_token(app: &Arc<AppState>, serving: &Arc<ServingContext>) -> Result<(), ApiError> {
    let admission = serving.client.admission();
    let permit = admission.admit(admission.queue_body()).map_err(|o| app.overloaded(&o))?;
    let (state, context) = (Arc::clone(app), Arc::clone(serving));
    let submit = move || {
        let body = [
            ("prompt", JsonValue::Ints(vec![0])),
            ("max_tokens", JsonValue::Int(1)),
            ("temperature", JsonValue::Int(0)),
            ("ignore_eos", JsonValue::Bool(true)),
        ];
        let body = Vec::from(body.map(|(name, value)| (name.to_owned(), value)));
        let fields = RequestFields::of_body(JsonValue::Object(body))?;
        completions::submit(&state, &context, fields, &HeaderParams::default(), permit)
    };
    let mut submitted = app.text_pool.run(0, submit).await?;
    submitted.generation.wait_first_event().await?;
    collect(submitted.generation).await.map(drop)
}

fn generated_tokens(serving: &ServingContext) -> u64 {
    serving.client.replica_stats().iter().map(|stats| stats.generated_tokens_total).sum()
}

/// Waits until more than `before` tokens were generated.
async fn other_progress(serving: &ServingContext, before: u64) {
    while generated_tokens(serving) <= before {
        sleep(PROGRESS_INTERVAL).await;
    }
}
