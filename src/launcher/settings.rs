//! Converts command-line arguments into the configuration structs of other crates.

use super::model_files::ModelFiles;
use crate::config::{
    AccessArgs, BF16_KV_CACHE_MISMATCH, DeviceArg, EngineArgs, ExecutorModeArg, KvCacheDtypeArg,
    LoadBalancePolicy, LoadFormatArg, LogArgs, OverloadHttpStatus, ProcessEnvironment,
    ReasoningFieldArg, ReplyArgs, SchedulingPolicyArg, ServeArgs, StringListArg,
};
use anyhow::{Context, Result, anyhow, bail};
use engine::AdmissionLimits;
use executor::{ExecutorConfig, GPU_LOGPROBS_MAX, KvCacheSize};
use hyper::StatusCode;
use metrics::MetricsConfig;
use models::ModelConfig;
use models::config::GenerationConfig;
use protocol::{
    DeviceKind, DraftAcceptanceRule, Epoch, ExecutorSettings, ExpertPlacement, GraphCaptureConfig,
    ParallelConfig, Rank, SpeculativeConfig, SpeculativeMethod,
};
use scheduler::{RoutingPolicy, SchedulerLimits};
use server::openai::chat::ReasoningFieldNames;
use server::openai::{FieldBounds, SamplingDefaults};
use server::{ApiKeys, CorsConfig, RequestSpanExporter, RequestTracer, ServerOptions};
use std::fs;
use tokio::runtime::Handle;

/// Number of file descriptors that are reserved for uses other than connections.
const DESCRIPTORS_RESERVED: u32 = 256;
/// Maximum number of connections if the descriptor limit of the process is unknown.
const CONNECTIONS_DEFAULT: u32 = 768;
const BODY_BYTES_MIN: usize = 8 << 20;
const BODY_BYTES_MAX: usize = 64 << 20;

/// Returns the options of the HTTP server.
///
/// Errors: API keys cannot be read; the CORS options are invalid; the request trace file cannot be opened; spans
/// cannot be exported to the endpoint.
pub fn options(args: &ServeArgs, runtime: &Handle) -> Result<ServerOptions> {
    let (reply, access) = (&args.reply, &args.access);
    let clients = access.client_keys()?;
    let keys = ApiKeys::new(
        clients.iter().map(String::as_str),
        access.admin_key.iter().map(String::as_str),
    );
    let defaults = ServerOptions::default();
    Ok(ServerOptions {
        api_keys: keys,
        admin_listener: access.admin_listen.is_some(),
        metrics_require_key: access.metrics_require_key,
        cors: cors(access)?,
        log_requests: args.log.enable_log_requests,
        spans: spans(&args.log, runtime)?,
        tracer: tracer(&args.log)?,
        keep_alive: args.http.sse_keep_alive_interval.0,
        overload_status: match args.engine.admission_status {
            OverloadHttpStatus::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
            OverloadHttpStatus::ServiceUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        },
        strict_fields: reply.strict_fields,
        force_usage: reply.enable_force_include_usage,
        usage_details: reply.enable_prompt_tokens_details,
        tokens_as_ids: reply.return_tokens_as_token_ids,
        reasoning_field: match reply.reasoning_field {
            ReasoningFieldArg::Both => ReasoningFieldNames::Both,
            ReasoningFieldArg::Reasoning => ReasoningFieldNames::Reasoning,
            ReasoningFieldArg::ReasoningContent => ReasoningFieldNames::ReasoningContent,
        },
        tokenizer_info: reply.enable_tokenizer_info_endpoint,
        owned_by: reply.owned_by.clone(),
        profile: args.engine.profile.is_some(),
        starting: match args.nodes.cluster() {
            Some(_) => "waiting for other nodes or loading the model; the log names missing nodes",
            None => defaults.starting,
        },
        ..defaults
    })
}

/// Creates the exporter of spans; `None` = requests have no spans.
///
/// Errors: the endpoint or the configuration of the exporter is invalid.
fn spans(log: &LogArgs, runtime: &Handle) -> Result<Option<RequestSpanExporter>> {
    let Some(endpoint) = &log.otlp_traces_endpoint else { return Ok(None) };
    let spans = RequestSpanExporter::open(endpoint, runtime.clone());
    spans.map(Some).context("--otlp-traces-endpoint")
}

/// Opens the request trace file; `None` = requests are not traced.
///
/// Errors: the file cannot be opened for writing.
fn tracer(log: &LogArgs) -> Result<Option<RequestTracer>> {
    let Some(path) = &log.trace_requests else { return Ok(None) };
    let tracer = RequestTracer::open(path, log.trace_prompts);
    tracer.map(Some).with_context(|| format!("--trace-requests {}", path.display()))
}

/// Returns the CORS configuration; `None` = requests from other origins are not allowed.
///
/// Errors: a name is not valid in an HTTP header.
fn cors(access: &AccessArgs) -> Result<Option<CorsConfig>> {
    let Some(origins) = &access.allowed_origins else { return Ok(None) };
    let list =
        |list: &Option<StringListArg>| list.as_ref().map_or_else(Vec::new, |list| list.0.clone());
    let cors = CorsConfig {
        origins: origins.0.clone(),
        methods: list(&access.allowed_methods),
        headers: list(&access.allowed_headers),
        credentials: access.allow_credentials,
    };
    if let Err(name) = cors.layer() {
        bail!(
            "--allowed-origins, --allowed-methods, --allowed-headers: {name} is not valid in an HTTP header"
        );
    }
    Ok(Some(cors))
}

/// Returns the maximum bytes of a request body for a model with this maximum length.
pub fn body_bytes_max(max_model_len: u32) -> usize {
    (32 * max_model_len as usize).clamp(BODY_BYTES_MIN, BODY_BYTES_MAX)
}

/// Returns the maximum bytes of a prompt that a chat template may render for a model with this maximum
/// length.
pub fn prompt_bytes_max(max_model_len: u32) -> usize {
    4 * body_bytes_max(max_model_len)
}

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
        None => engine.max_num_seqs.min(tokens_per_step - 1),
        Some(_) => engine.max_num_seqs,
    };
    SchedulerLimits {
        tokens_per_step,
        max_num_seqs,
        tokens_per_chunk: engine.tokens_per_chunk(),
        // Admission control limits the number of waiting and running requests to the same value, so this
        // limit of waiting requests is never reached.
        max_waiting_requests: engine.requests_in_flight_max(replicas, waiting_default),
        mixed_batches: engine.mixed,
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

/// Returns an error if the model cannot be served with the parallel configuration. The error message contains
/// the conflicting numbers.
pub fn check_world(args: &ServeArgs, files: &ModelFiles) -> Result<()> {
    let (model, draft) = (&files.config, files.draft.as_ref().map(|(_, config)| config));
    let parallel = parallel(args);
    let ParallelConfig { tp_size, dp_size, .. } = parallel;
    if let Some(cluster) = args.nodes.cluster()
        && device(args.engine.device) != DeviceKind::Cpu
    {
        bail!(
            "--nnodes {} on {:?}: executors on several nodes are supported on CPUs only: --device cpu",
            cluster.nodes,
            args.engine.device
        );
    }
    if let (Some(cluster), Some(_)) = (args.nodes.cluster(), draft) {
        let flag = args.speculation.flag_in_error();
        bail!("{flag}: draft checkpoints are supported on one node only, not on {}", cluster.nodes);
    }
    if let Some(draft) = draft {
        let checked = executor::check_draft_world(parallel, draft);
        checked.with_context(|| format!("{}: draft model", args.speculation.flag_in_error()))?;
    }
    let speculation = args.speculation.speculation();
    if let (Some(_), Some(_)) = (&files.pooling, speculation) {
        let flag = args.speculation.flag_in_error();
        bail!("{flag}: draft tokens are for text generation, not for --runner pooling");
    }
    let load_mtp =
        speculation.is_some_and(|speculation| speculation.method == SpeculativeMethod::Mtp);
    let model = &ModelConfig { load_mtp, ..model.clone() };
    let expert_placement = expert_placement(args)?;
    let checked = executor::check_world(parallel, model, expert_placement.as_ref());
    checked.with_context(|| {
        let file = args.parallel.expert_placement.as_ref();
        let placement_flag =
            file.map_or(String::new(), |file| format!(", --expert-placement {}", file.display()));
        format!("--tensor-parallel-size {tp_size}, --data-parallel-size {dp_size}{placement_flag}")
    })?;
    let checked = executor::check_speculation(speculation, model, draft);
    checked.map_err(|error| anyhow!("{}: {error}", args.speculation.flag_in_error()))
}

/// Returns the number of ranks that run on each node.
fn host_ranks(args: &ServeArgs) -> u16 {
    parallel(args).world_size() / args.nodes.cluster().map_or(1, |cluster| cluster.nodes)
}

/// Content of the `--expert-placement` file (EPLB map), in the format of SGLang's `--init-expert-location`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertPlacementFile {
    physical_to_logical_map: Vec<Vec<serde_json::Number>>,
}

/// Reads the expert placement; `None` = no file is given.
///
/// Errors: the file cannot be read or parsed.
fn expert_placement(args: &ServeArgs) -> Result<Option<ExpertPlacement>> {
    let Some(file) = &args.parallel.expert_placement else { return Ok(None) };
    let location = || format!("--expert-placement {}", file.display());
    let text = fs::read_to_string(file).with_context(location)?;
    let ExpertPlacementFile { physical_to_logical_map } =
        serde_json::from_str(&text).with_context(location)?;
    let layer = |(layer, experts): (usize, Vec<serde_json::Number>)| -> Result<Vec<u16>> {
        let number = |(index, number): (usize, &serde_json::Number)| {
            let expert = number.as_u64().and_then(|expert| u16::try_from(expert).ok());
            expert.with_context(|| {
                format!(
                    "layer {layer}: physical expert {index} is {number}, which is not an expert id"
                )
            })
        };
        experts.iter().enumerate().map(number).collect()
    };
    let layers: Result<_> = physical_to_logical_map.into_iter().enumerate().map(layer).collect();
    Ok(Some(ExpertPlacement { layers: layers.with_context(location)? }))
}

/// Returns the number of threads of a CPU rank, or of host threads of a GPU rank; `None` = the executor's
/// default. Without `--threads`, several ranks of a node share its cores equally.
fn threads(args: &ServeArgs) -> Option<u32> {
    let ranks = usize::from(host_ranks(args));
    let shared = (ranks > 1).then(|| (executor::physical_cores() / ranks).max(1));
    args.engine.threads.or(shared).map(|threads| threads as u32)
}

/// Rejects a data type of the KV cache that does not match the data type of the model, which is known only
/// after the checkpoint has been read.
fn check_cache(args: &ServeArgs, dtype: executor::ModelDtype) -> Result<()> {
    let cache = args.engine.kv_cache_dtype;
    if cache == KvCacheDtypeArg::Bf16 && dtype != executor::ModelDtype::Bfloat16 {
        bail!(BF16_KV_CACHE_MISMATCH);
    }
    Ok(())
}

/// Returns the configuration of the executors.
///
/// Errors: the data type of the KV cache does not match that of the model; `--max-logprobs` exceeds the limit
/// of a GPU; config overrides cannot be serialised.
pub fn executor(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &ProcessEnvironment,
) -> Result<ExecutorConfig> {
    let (engine, device) = (&args.engine, device(args.engine.device));
    let dtype = files.dtype(args.model.dtype);
    check_cache(args, dtype)?;
    let settings = ExecutorSettings {
        model_dir: files.dir.clone(),
        draft_model_dir: files.draft.as_ref().map(|(dir, _)| dir.clone()),
        config_overrides: Some(serde_json::to_string(&args.model.config_overrides())?),
        synth_seed: match files.source {
            models::LoadFormat::Synth { seed } => Some(seed),
            models::LoadFormat::Safetensors => None,
        },
        device,
        gpus: gpu_indices(args)?,
        libraries: engine.device_libraries.clone(),
        kernel_cache: environment.kernel_cache.clone(),
        dtype,
        kv_cache_dtype: match engine.kv_cache_dtype {
            KvCacheDtypeArg::Fp8 => executor::KvCacheDtype::Fp8,
            KvCacheDtypeArg::Auto | KvCacheDtypeArg::Bf16 => executor::KvCacheDtype::Auto,
        },
        threads: threads(args),
        block_tokens: engine.block_size,
        max_model_len: files.max_model_len,
        // Without `--max-model-len`, the scheduler reduces the maximum length to what fits in the KV cache.
        kv_tokens_min: args.model.max_model_len.tokens().unwrap_or(engine.block_size),
        max_num_seqs: engine.max_num_seqs,
        tokens_per_step: engine.tokens_per_step(),
        kv_cache_size: match (engine.num_gpu_blocks_override, engine.kv_cache_memory_bytes) {
            (Some(blocks), _) => KvCacheSize::Blocks(blocks),
            (None, Some(bytes)) => KvCacheSize::Bytes(bytes.0),
            (None, None) => KvCacheSize::Auto,
        },
        memory_utilization: engine.gpu_memory_utilization,
        // Pooling requests have no decode steps, for which graphs are captured.
        graph_capture: match &files.pooling {
            Some(_) => GraphCaptureConfig::Disabled,
            None => graph_capture(engine),
        },
        speculative: args.speculation.speculation(),
        max_logprobs: logprobs_max(device, args.reply.max_logprobs, files.config.vocab as u32)?,
        profile_dir: engine.profile.clone(),
        epoch: Epoch(1), // First epoch of the engine's executor groups.
        rank: Rank(0),
        parallel: parallel(args),
        ranks_on_host: host_ranks(args),
        expert_placement: expert_placement(args)?,
        rendezvous: None,
        one_shot_all_reduce: !args.parallel.disable_custom_all_reduce,
    };
    let draft = files.draft.as_ref().map(|(_, config)| config.clone());
    Ok(ExecutorConfig {
        settings,
        environment: environment.devices.clone(),
        model: files.config.clone(),
        draft,
        manifest: files.manifest,
    })
}

/// Returns the settings by which graphs of decode steps are captured.
fn graph_capture(engine: &EngineArgs) -> GraphCaptureConfig {
    let sizes = &engine.cudagraph_capture_sizes;
    match (engine.enforce_eager, sizes.is_empty()) {
        (true, _) => GraphCaptureConfig::Disabled,
        (false, true) => {
            GraphCaptureConfig::DefaultSizes { max_size: engine.max_cudagraph_capture_size }
        }
        (false, false) => GraphCaptureConfig::Sizes(sizes.clone()),
    }
}

/// Returns the GPU index of each rank; empty if `--device-ids` is not given.
fn gpu_indices(args: &ServeArgs) -> Result<Vec<u32>> {
    let (ids, ranks) = (&args.engine.device_ids, usize::from(parallel(args).world_size()));
    match (ids.len(), device(args.engine.device)) {
        (0, _) => {}
        (_, DeviceKind::Cpu) => bail!("--device-ids: the executors run on the CPU"),
        (count, _) if count != ranks => {
            bail!("--device-ids lists {count} GPUs, but {ranks} executors need one each")
        }
        _ => {}
    }
    Ok(ids.clone())
}

/// Returns the upper limit of a request's number of log-probabilities. `requested` −1 = the maximum that the
/// device supports.
fn logprobs_max(device: DeviceKind, requested: i64, vocab: u32) -> Result<u32> {
    let max = match device {
        DeviceKind::Cpu => vocab,
        DeviceKind::Rocm | DeviceKind::Cuda => vocab.min(GPU_LOGPROBS_MAX),
    };
    if requested > i64::from(max) && max < vocab {
        bail!(
            "--max-logprobs {requested}: a GPU reports at most {max} of the {vocab} ids of the \
             vocabulary per token; -1 selects this maximum"
        );
    }
    Ok(u32::try_from(requested).unwrap_or(max).min(max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_logprobs_are_capped_below_the_vocabulary() {
        let max =
            |device, requested| logprobs_max(device, requested, 151_936).map_err(|e| e.to_string());
        assert_eq!(max(DeviceKind::Cpu, -1), Ok(151_936));
        assert_eq!(max(DeviceKind::Cpu, 200_000), Ok(151_936));
        assert_eq!((max(DeviceKind::Cuda, 20), max(DeviceKind::Rocm, 0)), (Ok(20), Ok(0)));
        assert_eq!(max(DeviceKind::Cuda, -1), Ok(1024));
        let error = max(DeviceKind::Rocm, 2000).unwrap_err();
        for part in ["--max-logprobs 2000", "at most 1024", "151936 ids"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(
            logprobs_max(DeviceKind::Cuda, 2000, 300).ok(),
            Some(300),
            "the whole vocabulary is reported"
        );
    }
}
