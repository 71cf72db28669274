//! Converts command-line arguments into the configuration structs of other crates.

mod executor_settings;
mod server_options;

use super::model_files::ModelFiles;
use crate::config::{
    DeviceArg, EngineArgs, ExecutorModeArg, LoadBalancePolicy, LoadFormatArg, ReplyArgs,
    SchedulingPolicyArg, ServeArgs,
};
use engine::AdmissionLimits;
pub use executor_settings::{check_world, executor};
use metrics::MetricsConfig;
use models::config::GenerationConfig;
use protocol::{
    DeviceKind, DraftAcceptanceRule, ParallelConfig, SpeculativeConfig, SpeculativeMethod,
};
use scheduler::{RoutingPolicy, SchedulerLimits};
use server::openai::{FieldBounds, SamplingDefaults};
pub use server_options::{body_bytes_max, options, prompt_bytes_max};
use std::fs;

/// Number of file descriptors that are reserved for uses other than connections.
const DESCRIPTORS_RESERVED: u32 = 256;
/// Maximum number of connections if the descriptor limit of the process is unknown.
const CONNECTIONS_DEFAULT: u32 = 768;

/// Returns the limits for admission of requests, over all requests in flight.
pub fn admission(engine: &EngineArgs, limits: &SchedulerLimits) -> AdmissionLimits {
    AdmissionLimits {
        requests: u64::from(limits.max_waiting_requests),
        prefill_tokens: engine.max_num_queued_tokens.map_or(u64::MAX, u64::from),
        bytes: engine.max_queued_bytes.0,
    }
}

/// Returns the configuration of the metrics.
pub fn metrics(args: &ServeArgs, model_name: String, max_model_len: u32) -> MetricsConfig {
    MetricsConfig {
        replicas: args.parallel.data_parallel_size,
        tp_size: args.parallel.tensor_parallel_size,
        experts_shared: parallel(args).lockstep(),
        aggregate: args.metrics.metrics_aggregate,
        block_lifetimes: args.metrics.block_lifetime_sample_rate().is_some(),
        draft_tokens_max: args
            .speculation
            .speculation()
            .map_or(0, |speculation| speculation.draft_tokens),
        synthetic_acceptance: synthetic_acceptance(args).unwrap_or(0.0),
        buckets: args.metrics.custom_histogram_buckets.clone().unwrap_or_default(),
        ..MetricsConfig::new(model_name, max_model_len)
    }
}

/// Returns the acceptance rate if draft tokens are accepted at random (for benchmarks); `None` = draft tokens
/// are verified by the model.
pub fn synthetic_acceptance(args: &ServeArgs) -> Option<f64> {
    let config = args.speculation.speculation()?;
    match config.acceptance {
        DraftAcceptanceRule::Exact => None,
        DraftAcceptanceRule::Synthetic { per_mille, decrease: 0 } => {
            Some(f64::from(per_mille) / 1000.0)
        }
        // Here the acceptance probability decreases by 1 (1,000 thousandths) per draft token, so `per_mille`
        // equals the mean number of accepted draft tokens of a step, in thousandths.
        DraftAcceptanceRule::Synthetic { per_mille, .. } => {
            Some(f64::from(per_mille) / 1000.0 / f64::from(config.draft_tokens))
        }
    }
}

/// Returns the number of experts of each layer (0 for a dense layer), for which executors report token
/// counts. Empty for a model without experts.
pub fn expert_counts_by_layer(model: &models::ModelConfig) -> Vec<u16> {
    if model.moe.is_none() {
        return Vec::new();
    }
    let experts = |layer| model.moe_at(layer).map_or(0, |moe| moe.experts as u16);
    (0..model.layers).map(experts).collect()
}

/// Default number of waiting requests per replica, for a server that generates text.
const WAITING_CHOICES: u32 = 1024;
/// Default number of waiting requests per replica of a pooling server: the texts of four requests of the
/// maximum size.
const WAITING_TEXTS: u32 = 4 * server::pooling::PROMPTS_MAX as u32;

/// Returns the default number of waiting requests per replica, for a model.
pub fn waiting_requests_default(files: &ModelFiles) -> u32 {
    if files.pooling.is_some() { WAITING_TEXTS } else { WAITING_CHOICES }
}

/// Returns the limits of the scheduler: for the steps of each replica, and for the request queue that all
/// replicas share. `waiting_default` is the default number of waiting requests per replica.
pub fn limits(
    engine: &EngineArgs,
    replicas: u16,
    waiting_default: u32,
    max_model_len: u32,
    vocab_size: u32,
) -> SchedulerLimits {
    let tokens_per_step = engine.tokens_per_step();
    // Every step must have room for the decode rows of all running requests and for prefill tokens, so
    // `max_num_seqs` is reduced if necessary. If `--max-num-batched-tokens` is given, a conflict is an error
    // of the scheduler instead.
    let max_num_seqs = match engine.max_num_batched_tokens {
        None => engine.max_num_seqs().min(tokens_per_step - 1),
        Some(_) => engine.max_num_seqs(),
    };
    SchedulerLimits {
        tokens_per_step,
        max_num_seqs,
        tokens_per_chunk: engine.tokens_per_chunk(),
        max_step_ms: engine.max_step_ms(),
        // Admission control limits the number of waiting and running requests to the same value, so this
        // limit of waiting requests is never reached.
        max_waiting_requests: engine.requests_in_flight_max(replicas, waiting_default),
        mixed_batches: engine.mixed,
        state_checkpoint_tokens: engine.state_checkpoint_interval_tokens,
        // On a GPU, two steps in flight avoid that the GPU waits for the host between steps. On the CPU, a
        // second step has no benefit, because steps and host work use the same cores.
        steps_in_flight: if device(engine.device) == DeviceKind::Cpu { 1 } else { 2 },
        ..SchedulerLimits::cpu(max_model_len, vocab_size)
    }
}

/// Adds the speculative decoding settings to the limits of the scheduler.
pub fn limits_with_draft_tokens(
    limits: SchedulerLimits,
    speculation: Option<SpeculativeConfig>,
) -> SchedulerLimits {
    let Some(SpeculativeConfig { draft_tokens, method, .. }) = speculation else {
        return limits;
    };
    match method {
        // The n-gram proposer reads tokens on the host, so a step must wait for the output of the step before
        // it.
        SpeculativeMethod::Ngram { .. } => SchedulerLimits {
            draft_tokens,
            needs_token_history: true,
            steps_in_flight: 1,
            ..limits
        },
        SpeculativeMethod::Mtp | SpeculativeMethod::DraftModel | SpeculativeMethod::Eagle3 => {
            SchedulerLimits { draft_tokens, ..limits }
        }
    }
}

/// Returns the policy by which requests are routed to replicas.
pub fn routing(policy: LoadBalancePolicy) -> RoutingPolicy {
    match policy {
        LoadBalancePolicy::LeastRequests => RoutingPolicy::LeastRequests,
        LoadBalancePolicy::LeastTokens => RoutingPolicy::LeastTokens,
        LoadBalancePolicy::Prefix => RoutingPolicy::Prefix,
        LoadBalancePolicy::RoundRobin => RoutingPolicy::RoundRobin,
    }
}

/// Returns the allowed ranges of request fields.
///
/// `logprobs_max`: maximum number of log-probabilities in the settings of the executor.
pub fn field_bounds(
    args: &ServeArgs,
    max_model_len: u32,
    vocab_size: u32,
    logprobs_max: u32,
) -> FieldBounds {
    FieldBounds {
        vocab_size,
        max_model_len,
        logprobs_max: Some(logprobs_max).filter(|max| *max < vocab_size),
        replicas: args.parallel.data_parallel_size,
        priorities: args.engine.scheduling_policy == SchedulingPolicyArg::Priority,
    }
}

/// Returns the sampling parameters that apply if a request does not set them.
pub fn sampling_defaults(reply: &ReplyArgs, generation: &GenerationConfig) -> SamplingDefaults {
    let neutral = SamplingDefaults::default();
    if !reply.uses_generation_config() {
        return neutral;
    }
    SamplingDefaults {
        temperature: generation.temperature.unwrap_or(neutral.temperature),
        top_p: generation.top_p.unwrap_or(neutral.top_p),
        top_k: generation.top_k.unwrap_or(neutral.top_k),
        min_p: generation.min_p.unwrap_or(neutral.min_p),
        repetition: generation.repetition_penalty.unwrap_or(neutral.repetition),
    }
}

/// Returns the maximum number of client connections, which depends on the limit of open file descriptors of
/// this process.
pub fn connections_max() -> u32 {
    let text = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u32>().ok());
    let max = soft.map_or(CONNECTIONS_DEFAULT, |n| n.saturating_sub(DESCRIPTORS_RESERVED));
    max.clamp(16, 1 << 20)
}

/// Returns the format of the weights to load.
pub fn load_format(args: &ServeArgs) -> models::LoadFormat {
    match args.model.load_format {
        LoadFormatArg::Auto | LoadFormatArg::Safetensors => models::LoadFormat::Safetensors,
        LoadFormatArg::Synth => models::LoadFormat::Synth { seed: args.engine.seed },
    }
}

/// Returns the device kind of a device for which `auto` has been resolved.
pub fn device(kind: DeviceArg) -> DeviceKind {
    match kind {
        DeviceArg::Auto | DeviceArg::Cpu => DeviceKind::Cpu,
        DeviceArg::Rocm => DeviceKind::Rocm,
        DeviceArg::Cuda => DeviceKind::Cuda,
    }
}

/// Whether executors are separate processes instead of a thread of the server. GPU executors are always
/// processes, because a driver failure may end the process. If there are several executors, they are
/// processes, so that each can fail separately.
pub fn uses_executor_processes(args: &ServeArgs) -> bool {
    let forced = device(args.engine.device) != DeviceKind::Cpu || parallel(args).world_size() > 1;
    forced || args.engine.executor == ExecutorModeArg::Process
}

/// Returns the number of tensor-parallel ranks, the number of data-parallel replicas, and whether expert
/// parallelism is used.
pub fn parallel(args: &ServeArgs) -> ParallelConfig {
    let (tp_size, dp_size) = (args.parallel.tensor_parallel_size, args.parallel.data_parallel_size);
    // On a single rank, expert parallelism has no effect, because the rank has all experts.
    let experts = args.parallel.enable_expert_parallel && (tp_size > 1 || dp_size > 1);
    ParallelConfig { tp_size, dp_size, expert_parallel: experts }
}
