//! Content of the route `/server_info`: all flags, and the values that the server derived from them.

use super::settings::synthetic_acceptance;
use crate::config::ServeArgs;
use engine::StartupReport;
use protocol::ExecutorSettings;
use scheduler::SchedulerLimits;
use serde_json::{Value, json};
use server::ServingContext;

/// Returns the effective configuration of the server, without secrets.
pub fn server_info(
    args: &ServeArgs,
    settings: &ExecutorSettings,
    serving: &ServingContext,
    startup: &StartupReport,
    limits: &SchedulerLimits,
) -> Value {
    let bounds = &serving.field_bounds;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": serving.card.root,
        "served_model_names": serving.card.names.all().collect::<Vec<_>>(),
        "fingerprint": serving.card.fingerprint,
        "flags": args.flags,
        "engine": {
            "device": format!("{:?}", args.engine.device).to_lowercase(),
            "dtype": settings.dtype.name(),
            "replicas": bounds.replicas,
            "tensor_parallel_size": args.parallel.tensor_parallel_size,
            "max_model_len": bounds.max_model_len,
            "vocab_size": bounds.vocab_size,
            "block_size": startup.memory.kv_spec.block_tokens,
            "num_gpu_blocks": startup.ready.kv_blocks,
            "kv_cache_tokens": serving.pool_tokens,
            "max_num_seqs": limits.seq_slot_count(),
            "max_num_batched_tokens": limits.tokens_per_step,
            "steps_in_flight": limits.steps_in_flight,
            "num_speculative_tokens": limits.draft_tokens,
            "synthetic_acceptance_rate": synthetic_acceptance(args),
            "graph_rows": startup.ready.capture_sizes,
            "max_num_queued_reqs": limits.max_waiting_requests,
            "max_queued_bytes": args.engine.max_queued_bytes.0,
            "max_text_memory": args.engine.max_text_memory.0,
            "max_num_queued_tokens": args.engine.max_num_queued_tokens,
            "max_logprobs": bounds.logprobs_max,
            "body_bytes_max": serving.body_bytes_max,
            "chat_template": serving.template.is_some(),
        },
    })
}
