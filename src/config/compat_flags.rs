//! Flags of vLLM, SGLang and ATOM that are not supported: flags without effect, and flags that are rejected
//! with a reason. Names are in kebab case without leading dashes.

/// Flag that is accepted without effect and noted in the log.
pub(super) struct InertFlag {
    pub(super) name: &'static str,
    /// Values of the flag.
    value: InertFlagValue,
    /// Reason why the flag has no effect.
    pub(super) reason: &'static str,
}

/// Values of an inert flag.
enum InertFlagValue {
    Nothing,
    Anything,
    /// Values without effect; other values are rejected.
    OneOf(&'static [&'static str]),
}

const fn inert_flag(name: &'static str, takes: InertFlagValue, because: &'static str) -> InertFlag {
    InertFlag { name, value: takes, reason: because }
}

impl InertFlag {
    pub(super) fn takes_value(&self) -> bool {
        !matches!(self.value, InertFlagValue::Nothing)
    }

    /// Whether the flag has no effect with this value.
    pub(super) fn is_inert_with(&self, value: &str) -> bool {
        match self.value {
            InertFlagValue::Nothing | InertFlagValue::Anything => true,
            InertFlagValue::OneOf(values) => values.contains(&value),
        }
    }
}

/// Flags accepted for compatibility.
pub(super) const INERT_FLAGS: &[InertFlag] = &[
    inert_flag(
        "trust-remote-code",
        InertFlagValue::Nothing,
        "no code from a model folder is ever executed",
    ),
    inert_flag("enable-auto-tool-choice", InertFlagValue::Nothing, "always on"),
    inert_flag("enable-chunked-prefill", InertFlagValue::Nothing, "always on"),
    inert_flag(
        "disable-log-requests",
        InertFlagValue::Nothing,
        "requests are not logged unless traced",
    ),
    inert_flag(
        "enable-log-requests",
        InertFlagValue::Nothing,
        "requests are not logged unless traced",
    ),
    inert_flag("disable-log-stats", InertFlagValue::Nothing, "statistics are not logged"),
    inert_flag("api-server-count", InertFlagValue::Anything, "one process answers all connections"),
    inert_flag("async-scheduling", InertFlagValue::Nothing, "always on"),
    inert_flag(
        "distributed-executor-backend",
        InertFlagValue::OneOf(&["mp", "uni"]),
        "executors are processes of this server, or a thread of it",
    ),
    inert_flag("uvicorn-log-level", InertFlagValue::Anything, "there is no uvicorn"),
    inert_flag("disable-uvicorn-access-log", InertFlagValue::Nothing, "there is no uvicorn"),
    inert_flag("timeout-keep-alive", InertFlagValue::Anything, "idle connections close after 60 s"),
    inert_flag("level", InertFlagValue::Anything, "there are no compilation levels"),
    inert_flag("optimization-level", InertFlagValue::Anything, "there are no compilation levels"),
    inert_flag(
        "disable-access-log-for-endpoints",
        InertFlagValue::Anything,
        "requests are not logged unless traced",
    ),
    inert_flag("enable-request-id-headers", InertFlagValue::Nothing, "always on"),
    inert_flag("enable-server-load-tracking", InertFlagValue::Nothing, "always on"),
    inert_flag("language-model-only", InertFlagValue::Nothing, "models read text only"),
    inert_flag(
        "use-tqdm-on-load",
        InertFlagValue::Nothing,
        "progress is shown wherever there is a terminal",
    ),
];

/// Flags of a feature that this release does not have.
pub(super) struct UnsupportedFlags {
    /// Reason why the flags are rejected.
    pub(super) reason: &'static str,
    /// Names, separated by spaces.
    names: &'static str,
}

impl UnsupportedFlags {
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.names.split(' ')
    }
}

/// Returns the reason why a flag is rejected, if it is.
pub(super) fn unsupported_reason(name: &str) -> Option<&'static str> {
    let refused =
        UNSUPPORTED_FLAGS.iter().find(|refused| refused.names().any(|refused| refused == name));
    refused.map(|refused| refused.reason)
}

/// Values of unsupported flags that request the built-in behaviour: manifests often spell out defaults.
pub(super) const NO_OP_VALUES: &[(&str, &[&str])] = &[
    ("pipeline-parallel-size", &["1"]),
    ("decode-context-parallel-size", &["1"]),
    ("prefill-context-parallel-size", &["1"]),
    ("data-parallel-backend", &["mp"]),
    ("expert-placement-strategy", &["linear"]),
    ("quantization", &["none", "None"]),
    ("tokenizer-mode", &["auto", "hf"]),
    ("config-format", &["auto", "hf"]),
    ("model-impl", &["auto"]),
    ("task", &["auto", "generate"]),
    ("runner", &["auto", "generate"]),
    ("convert", &["auto", "none"]),
    ("chat-template-content-format", &["auto", "string"]),
    ("response-role", &["assistant"]),
    ("logprobs-mode", &["raw_logprobs"]),
    ("guided-decoding-backend", &["auto", "guidance"]),
    ("stream-interval", &["1"]),
    ("safetensors-load-strategy", &["lazy"]),
    ("cpu-offload-gb", &["0"]),
    ("swap-space", &["0"]),
    ("attention-backend", &["auto"]),
    ("moe-backend", &["auto"]),
    ("linear-backend", &["auto"]),
    ("performance-mode", &["balanced"]),
];

/// Whether a value of an unsupported flag requests the built-in behaviour.
pub(super) fn is_no_op_value(name: &str, value: &str) -> bool {
    NO_OP_VALUES.iter().any(|(flag, values)| *flag == name && values.contains(&value))
}

const fn unsupported(because: &'static str, names: &'static str) -> UnsupportedFlags {
    UnsupportedFlags { reason: because, names }
}

/// Unsupported flags with the reason of their rejection.
pub(super) const UNSUPPORTED_FLAGS: &[UnsupportedFlags] = &[
    unsupported(
        "weights are served as the checkpoint stores them",
        "quantization online-quant-config quantization-config allow-deprecated-quantization",
    ),
    unsupported(
        "tokens come to experts in the way that moves fewer bytes: to all ranks, or to those alone \
         that hold their experts",
        "all2all-backend",
    ),
    unsupported(
        "replicas are spread evenly over the nodes of --nnodes, and one scheduler on node 0 serves them all; the \
         nodes meet at --master-addr and --master-port",
        "data-parallel-rank data-parallel-backend data-parallel-hybrid-lb \
         data-parallel-external-lb data-parallel-multi-port-external-lb data-parallel-supervisor-port \
         dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s \
         dp-supervisor-probe-failure-threshold dp-sync-interval enable-elastic-ep elastic-ep-max-dp-size \
         ray-workers-use-nsight",
    ),
    unsupported(
        "nodes wait for each other as --startup-timeout says, and give each other up after 5 s without a sign of life",
        "distributed-timeout-seconds cpu-distributed-timeout-seconds",
    ),
    unsupported(
        "how ranks load and share a model follows from their number",
        "disable-nccl-for-dp-synchronization enable-nccl-comm-suspend enable-ep-weight-filter \
         enable-batch-sharded-sampling enable-hc-sp max-parallel-loading-workers",
    ),
    unsupported(
        "the executor is restarted as --step-deadline says, in no other way",
        "enable-fault-tolerance fault-tolerance-config watchdog-config",
    ),
    unsupported(
        "KV blocks are not moved between servers",
        "kv-transfer-config kv-offloading-backend kv-offloading-size ec-transfer-config ec-manager-config \
         enable-scale-out",
    ),
    unsupported(
        "experts stay where they are loaded; --expert-placement says where that is",
        "enable-eplb eplb-config expert-placement-strategy",
    ),
    unsupported(
        "batches are not overlapped in pairs",
        "enable-tbo enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size",
    ),
    unsupported(
        "adapters are not loaded",
        "enable-lora lora-modules max-loras max-lora-rank max-cpu-loras max-lora-cls-labels lora-dtype \
         lora-target-modules fully-sharded-loras default-mm-loras enable-mixed-moe-lora-format \
         enable-moe-shared-loras enable-tower-connector-lora specialize-active-lora",
    ),
    unsupported("layers are not split over devices", "pipeline-parallel-size"),
    unsupported(
        "one context is not split over devices",
        "decode-context-parallel-size prefill-context-parallel-size dcp-comm-backend \
         dcp-kv-cache-interleave-size dcp-q-replicate cp-kv-cache-interleave-size",
    ),
    unsupported("--speculative-config names the model that drafts", "spec-model"),
    unsupported(
        "drafts are counted over all requests, as vllm:spec_decode_*",
        "per-request-spec-decode-metrics",
    ),
    unsupported(
        "kernels are this server's own and chosen by device and shape",
        "attention-backend attention-config moe-backend linear-backend kernel-config ir-op-priority \
         enable-flashinfer-autotune disable-cascade-attn monokernel use-fp64-gumbel \
         sparse-indexer-topk-backend",
    ),
    unsupported(
        "models are not compiled by PyTorch",
        "compilation-config jit-monitor-mode jit-monitor-verbose performance-mode",
    ),
    unsupported(
        "no served model has recurrent state",
        "state-checkpoint-interval-tokens mamba-backend mamba-block-size mamba-cache-dtype \
         mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm \
         enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint gdn-prefill-backend \
         kda-prefill-backend kda-decode-backend use-replayssm replayssm-buffer-len",
    ),
    unsupported(
        "models read text only",
        "limit-mm-per-prompt enable-mm-embeds skip-mm-profiling interleave-mm-strings media-io-kwargs \
         mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-processor-device \
         mm-shm-cache-max-object-size-mb mm-tensor-ipc mm-ipc-gpu-memory-gb mm-hasher-algorithm \
         mm-device-do-normalize mm-encoder-only mm-encoder-tp-mode mm-encoder-attn-backend \
         mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path \
         mm-encoder-fp8-scale-save-margin video-pruning-method video-pruning-rate \
         disable-chunked-mm-input allowed-local-media-path allowed-media-domains trust-request-mm-kwargs",
    ),
    unsupported(
        "models generate text",
        "task runner convert pooler-config diffusion-config enable-flash-late-interaction",
    ),
    unsupported("prompts are text or token ids", "enable-prompt-embeds skip-tokenizer-init"),
    unsupported("tokenizer.json is read by the one library there is", "tokenizer-mode"),
    unsupported("--revision is that of the whole folder", "tokenizer-revision"),
    unsupported(
        "config.json is read by what is built in; --hf-overrides changes members",
        "hf-config-path config-format model-impl engram-config",
    ),
    unsupported(
        "code from elsewhere is never loaded",
        "code-revision model-class-overrides tool-parser-plugin reasoning-parser-plugin \
         io-processor-plugin logits-processors middleware scheduler-cls worker-cls worker-extension-cls",
    ),
    unsupported("the hub's token comes from HF_TOKEN, or the file token in HF_HOME", "hf-token"),
    unsupported(
        "tensor files are always mapped",
        "no-mmap safetensors-load-strategy safetensors-prefetch-block-size \
         safetensors-prefetch-num-threads model-loader-extra-config ignore-patterns pt-load-map-location",
    ),
    unsupported(
        "weights stay where they are loaded",
        "cpu-offload-gb cpu-offload-params offload-backend offload-params offload-group-size \
         offload-num-in-group offload-prefetch-step enable-sleep-mode sleep-mode-backend \
         sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator \
         weight-transfer-config enable-shm-tensor-arena",
    ),
    unsupported("preempted requests are recomputed, not swapped", "swap-space"),
    unsupported(
        "threads are placed by the system",
        "numa-bind numa-bind-cpus numa-bind-nodes renderer-num-workers",
    ),
    unsupported(
        "a step is shaped by --max-num-batched-tokens, --max-num-seqs and --long-prefill-token-threshold alone",
        "max-num-active-seqs max-num-scheduled-tokens prefill-schedule-interval \
         long-prefill-token-threshold-adaptive scheduler-reserve-full-isl watermark watermark-config",
    ),
    unsupported(
        "blocks are hashed, kept and shared in the one way that KV-event consumers know",
        "prefix-caching-hash-algo prefix-cache-retention-interval prefix-match-unit \
         disable-hybrid-kv-cache-manager disable-sliding-window kv-sharing-fast-prefill \
         swa-bounded-replay kv-cache-dtype-skip-layers",
    ),
    unsupported(
        "tokens are sent as they come; a request may ask for stream_interval",
        "stream-interval",
    ),
    unsupported(
        "templates get the text of a message as one string, and the roles of its requests",
        "chat-template-content-format response-role",
    ),
    unsupported(
        "it follows from the request and the template",
        "reasoning-effort-map reasoning-config tool-strict-level anthropic-disabled-thinking-effort \
         exclude-tools-when-tool-choice-none",
    ),
    unsupported("tools run at the client", "tool-server"),
    unsupported(
        "sampling defaults are those of generation_config.json, or none",
        "override-generation-config",
    ),
    unsupported("log-probabilities are those of the raw logits", "logprobs-mode"),
    unsupported(
        "llguidance is the one there is",
        "guided-decoding-backend structured-outputs-config",
    ),
    unsupported(
        "replies hold what docs/openapi.json says",
        "enable-per-request-metrics fingerprint-mode fingerprint-value return-sampling-mask \
         enable-return-routed-experts aux-output-config",
    ),
    unsupported(
        "there is no such route",
        "cohere-format cohere-is-reasoning-model tokens-only \
         enable-offline-docs",
    ),
    unsupported("/openapi.json is always there", "disable-fastapi-docs"),
    unsupported("requests come over HTTP/1.1 and TCP", "grpc grpc-port uds"),
    unsupported("paths are not rewritten", "root-path"),
    unsupported(
        "a head may have 64 fields and 64 KiB",
        "h11-max-header-count h11-max-incomplete-event-size",
    ),
    unsupported(
        "TLS ends in front of the server",
        "ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh",
    ),
    unsupported(
        "RUST_LOG and --log-format shape the log",
        "log-level log-config-file logging-config aggregate-engine-logging",
    ),
    unsupported(
        "the log holds no prompts and no outputs; --trace-requests writes a line for each request",
        "enable-log-outputs enable-log-deltas max-log-len log-error-stack \
         enable-logging-iteration-details",
    ),
    unsupported("metrics have vLLM's names", "metrics-sglang"),
    unsupported("no metric is hidden", "show-hidden-metrics-for-version"),
    unsupported("hadron:graph_replays counts them", "cudagraph-metrics"),
    unsupported("floating-point work per step is not estimated", "enable-mfu-metrics"),
    unsupported(
        "spans are not exported; --profile records steps",
        "otlp-traces-endpoint collect-detailed-traces profiler-config enable-layerwise-nvtx-tracing \
         enable-trace-replay",
    ),
    unsupported("HADRON_* and VLLM_* variables are not checked", "fail-on-environ-validation"),
    unsupported("there is nothing it would be passed on to", "additional-config"),
];
