//! Probe `/health_generate`: runs one request through the engine within a deadline. The request generates one
//! token or, on a pooling server, pools one prompt.

use crate::api_error::ApiError;
use crate::app::{AppState, ServingContext};
use crate::openai::collect::collect;
use crate::openai::completions;
use crate::openai::endpoint::{EndpointRequest, HeaderParams};
use crate::openai::generation::RequestGeneration;
use crate::openai::pooling_params::{self, submit_pooling};
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;
use axum::extract::State;
use engine::AdmissionPermit;
use scheduler::SchedulerStats;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Deadline of the probe, as in SGLang.
const DEADLINE: Duration = Duration::from_secs(20);
/// Interval at which the probe checks whether other requests make progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Error reasons of rejected requests that show that the server is overloaded.
const OVERLOAD_REASONS: [&str; 4] =
    ["max_num_queued_reqs", "max_num_queued_tokens", "max_queued_bytes", "text_memory"];

/// Handles `/health_generate`: succeeds once the engine has computed a result, either for the probe or, if
/// the engine is busy, for another request. At most one probe runs at a time; other probes wait.
pub(crate) async fn health_generate(State(app): State<Arc<AppState>>) -> Result<(), ApiError> {
    let serving = Arc::clone(app.accepting()?);
    let generated = timeout(DEADLINE, async {
        let _turn = app.generation_probe.lock().await;
        let before = progress(&serving);
        tokio::select! {
            result = run_request(&app, &serving) => match result {
                Ok(()) => Ok(()),
                // An overloaded server rejects the probe request, but counts as healthy if other requests
                // make progress.
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
        let message = format!("the engine had no result within {} s", DEADLINE.as_secs());
        Err(ApiError::unavailable("engine_unavailable", &message, 10))
    })
}

/// Runs the probe's request.
async fn run_request(app: &Arc<AppState>, serving: &Arc<ServingContext>) -> Result<(), ApiError> {
    let admission = serving.client.admission();
    let permit = admission.admit(admission.queue_body()).map_err(|o| app.overloaded(&o))?;
    let (state, context) = (Arc::clone(app), Arc::clone(serving));
    let submit = move || match context.pooler {
        Some(_) => submit_pooled_prompt(&state, &context, permit),
        None => submit_one_token(&state, &context, permit),
    };
    let mut generation = app.text_pool.run(0, submit).await?;
    generation.wait_first_event().await?;
    collect(generation).await.map(drop)
}

/// Submits a request that generates one token.
fn submit_one_token(
    app: &Arc<AppState>,
    serving: &Arc<ServingContext>,
    permit: AdmissionPermit,
) -> Result<RequestGeneration, ApiError> {
    let body = [
        ("prompt", JsonValue::Ints(vec![0])),
        ("max_tokens", JsonValue::Int(1)),
        ("temperature", JsonValue::Int(0)),
        ("ignore_eos", JsonValue::Bool(true)),
    ];
    let body = Vec::from(body.map(|(name, value)| (name.to_owned(), value)));
    let fields = RequestFields::of_body(JsonValue::Object(body))?;
    let headers = &HeaderParams::default();
    let request = EndpointRequest { app, serving, fields, headers, permit };
    completions::submit(request).map(|submitted| submitted.generation)
}

/// Submits a request that pools a prompt of one token.
fn submit_pooled_prompt(
    app: &AppState,
    serving: &ServingContext,
    permit: AdmissionPermit,
) -> Result<RequestGeneration, ApiError> {
    let mut fields = RequestFields::of_body(JsonValue::Object(Vec::new()))?;
    let mut params = pooling_params::take(&mut fields, &serving.field_bounds)?;
    HeaderParams::default().pooling_request_id(&mut params, serving, app)?;
    submit_pooling(app, serving, &mut params, &[vec![0]], "input", permit)
}

/// Returns a counter that grows while the engine computes results: generated tokens or, on a pooling server,
/// steps.
fn progress(serving: &ServingContext) -> u64 {
    let count = |stats: &SchedulerStats| match serving.pooler {
        Some(_) => stats.steps_total,
        None => stats.generated_tokens_total,
    };
    serving.client.replica_stats().iter().map(count).sum()
}

/// Waits until the engine's progress counter exceeds `before`.
async fn other_progress(serving: &ServingContext, before: u64) {
    while progress(serving) <= before {
        sleep(PROGRESS_INTERVAL).await;
    }
}
