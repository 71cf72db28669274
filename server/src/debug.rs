//! `/debug/steps`, `/debug/kv` and `/debug/experts`: admin routes for debugging.

use super::api_error::ApiError;
use super::app::AppState;
use axum::Json;
use axum::extract::State;
use engine::PrefixIndexSnapshot;
use metrics::{STEP_RING_CAPACITY, StepTimingRecord};
use protocol::BlockHash;
use scheduler::{BlockStats, KvGroupHitStats, StateSlotStats};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Maximum wait for a reply of the scheduler thread, which replies between two steps.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reply of `/debug/steps`: timing records of the latest steps, oldest first.
#[derive(Debug, Serialize)]
pub(crate) struct StepsResponse {
    steps: Vec<StepTimingRecord>,
}

/// Returns the timing records of the latest 1,024 steps.
pub(crate) async fn steps(
    State(app): State<Arc<AppState>>,
) -> Result<Json<StepsResponse>, ApiError> {
    let serving = app.serving()?;
    Ok(Json(StepsResponse { steps: serving.metrics.steps.ring.newest(STEP_RING_CAPACITY) }))
}

/// Returns the number of tokens routed to each expert since the start, indexed by replica, layer and expert;
/// empty if expert counting is off.
pub(crate) async fn experts(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let tables = app.serving()?.metrics.experts.table();
    let replicas = tables.into_iter().enumerate();
    let replicas: Vec<Value> = replicas
        .map(|(dp_rank, table)| json!({"dp_rank": dp_rank, "logical_count": table}))
        .collect();
    Ok(Json(json!({"replicas": replicas})))
}

/// Returns the hashes of all cached KV blocks of every replica in ascending order.
///
/// To avoid delaying steps, the scheduler thread only copies the hashes, between two steps, and only one
/// listing runs at a time.
pub(crate) async fn kv(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let serving = app.serving()?;
    let timed_out = || ApiError::unavailable("engine_unavailable", "the scheduler timed out", 10);
    let listing_guard =
        timeout(REPLY_TIMEOUT, app.kv_listing.lock()).await.map_err(|_| timed_out())?;
    let Ok(Ok(cached_blocks)) = timeout(REPLY_TIMEOUT, serving.client.cached_blocks()).await else {
        return Err(timed_out());
    };
    let listed =
        spawn_blocking(|| cached_blocks.into_iter().map(cached_blocks_json).collect::<Vec<_>>())
            .await;
    drop(listing_guard);
    let replicas = listed.map_err(|_| ApiError::internal())?;
    Ok(Json(json!({"replicas": replicas})))
}

fn cached_blocks_json(mut cached: PrefixIndexSnapshot) -> Value {
    let groups: Vec<Vec<String>> = cached.hashes.iter_mut().map(|hashes| sorted(hashes)).collect();
    json!({
        "dp_rank": cached.replica.0,
        "block_size": cached.block_tokens,
        "blocks": blocks(&cached.blocks),
        "state_slots": state_slots(&cached.state_slots),
        "prefix_hits_by_group": cached.group_hits.iter().map(group_hits).collect::<Vec<_>>(),
        "resident": groups.first(),
        "resident_by_group": groups,
    })
}

fn sorted(hashes: &mut [BlockHash]) -> Vec<String> {
    hashes.sort_unstable_by_key(|hash| hash.0);
    hashes.iter().map(|hash| format!("{:016x}", hash.0)).collect()
}

/// Slots of recurrent state; null if the model has none.
fn state_slots(slots: &StateSlotStats) -> Value {
    if slots.pool == 0 {
        return Value::Null;
    }
    json!({
        "pool": slots.pool,
        "vacant": slots.free,
        "checkpoints": slots.checkpoints,
        "in_use": slots.in_use,
    })
}

/// Tokens of prefix hits in one KV group.
fn group_hits(group: &KvGroupHitStats) -> Value {
    json!({
        "kind": group.kind.name(),
        "offered": group.offered,
        "hits": group.given,
        "misses": group.missed,
    })
}

fn blocks(blocks: &BlockStats) -> Value {
    json!({
        "pool": blocks.pool,
        "vacant": blocks.free,
        "cached": blocks.cached,
        "in_use": blocks.in_use,
        "reserved": blocks.reserved,
    })
}
