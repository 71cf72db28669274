//! What `/server_info` says: flags as they were read, and what became of those left to the server.

use super::settings::synthetic_acceptance;
use super::start_up::Up;
use crate::config::ServeArgs;
use crate::server::app::Serving;
use protocol::Settings;
use scheduler::Limits;
use serde_json::{Value, json};

/// The configuration in force, without secrets.
pub fn of(
    args: &ServeArgs,
    settings: &Settings,
    serving: &Serving,
    up: &Up,
    limits: &Limits,
) -> Value {
    let bounds = &serving.bounds;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": serving.card.root,
        "served_model_names": serving.card.names,
        "fingerprint": serving.card.fingerprint,
        "flags": args.flags,
        "engine": {
            "device": format!("{:?}", args.engine.device).to_lowercase(),
            "dtype": settings.dtype.name(),
            "replicas": bounds.replicas,
            "tensor_parallel_size": args.parallel.tensor_parallel_size,
            "max_model_len": bounds.max_model_len,
            "vocab_size": bounds.vocab_size,
            "block_size": up.memory.spec.block_tokens,
            "num_gpu_blocks": up.ready.blocks,
            "kv_cache_tokens": serving.pool_tokens,
            "max_num_seqs": limits.seats(),
            "max_num_batched_tokens": limits.tokens_per_step,
            "steps_in_flight": limits.steps_in_flight,
            "num_speculative_tokens": limits.drafts,
            "synthetic_acceptance_rate": synthetic_acceptance(args),
            "graph_rows": up.ready.graph_rows,
            "max_num_queued_reqs": args.engine.requests_in_flight_max(bounds.replicas),
            "max_queued_bytes": args.engine.max_queued_bytes.0,
            "max_text_memory": args.engine.max_text_memory.0,
            "max_num_queued_tokens": args.engine.max_num_queued_tokens,
            "max_logprobs": bounds.logprobs_max,
            "body_bytes_max": serving.body_bytes_max,
            "chat_template": serving.template.is_some(),
        },
    })
}
