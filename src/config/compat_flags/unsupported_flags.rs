//! Flags of other engines that are rejected, with the reason, and values with which they are accepted.

/// Flags of an unsupported feature, which are rejected.
pub(crate) struct UnsupportedFlags {
    /// Reason why the flags are rejected.
    pub(crate) reason: &'static str,
    /// Names of the flags, separated by spaces.
    names: &'static str,
}

impl UnsupportedFlags {
    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.names.split(' ')
    }
}

/// Returns the reason why a flag is rejected; `None` = the flag is not rejected.
pub(crate) fn unsupported_reason(name: &str) -> Option<&'static str> {
    let entry = UNSUPPORTED_FLAGS.iter().find(|entry| entry.names().any(|flag| flag == name));
    entry.map(|entry| entry.reason)
}

/// Values of unsupported flags that are accepted, because they request the built-in behaviour. Deployment
/// manifests often set flags to their defaults.
pub(crate) const NO_OP_VALUES: &[(&str, &[&str])] = &[
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
pub(crate) fn is_no_op_value(name: &str, value: &str) -> bool {
    NO_OP_VALUES.iter().any(|(flag, values)| *flag == name && values.contains(&value))
}

const fn unsupported(reason: &'static str, names: &'static str) -> UnsupportedFlags {
    UnsupportedFlags { reason, names }
}

/// Unsupported flags, with the reason why they are rejected.
pub(crate) const UNSUPPORTED_FLAGS: &[UnsupportedFlags] = &[
    unsupported(
        "weights keep the quantisation of the checkpoint",
        "quantization online-quant-config quantization-config allow-deprecated-quantization",
    ),
    unsupported(
        "the expert-parallel dispatch is selected by the number of bytes: all-gather, or all-to-all to \
         the ranks of the selected experts",
        "all2all-backend",
    ),
    unsupported(
        "replicas are distributed evenly over the nodes of --nnodes with one scheduler on node 0; the \
         rendezvous address is --master-addr and --master-port",
        "data-parallel-rank data-parallel-backend data-parallel-hybrid-lb \
         data-parallel-external-lb data-parallel-multi-port-external-lb data-parallel-supervisor-port \
         dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s \
         dp-supervisor-probe-failure-threshold dp-sync-interval enable-elastic-ep elastic-ep-max-dp-size \
         ray-workers-use-nsight",
    ),
    unsupported(
        "nodes wait for each other for --startup-timeout; their heartbeat timeout is 5 s",
        "distributed-timeout-seconds cpu-distributed-timeout-seconds",
    ),
    unsupported(
        "loading and sharding are derived from the number of ranks",
        "disable-nccl-for-dp-synchronization enable-nccl-comm-suspend enable-ep-weight-filter \
         enable-batch-sharded-sampling enable-hc-sp max-parallel-loading-workers",
    ),
    unsupported(
        "executors are restarted after --step-deadline only",
        "enable-fault-tolerance fault-tolerance-config watchdog-config",
    ),
    unsupported(
        "KV blocks are not transferred between servers",
        "kv-transfer-config kv-offloading-backend kv-offloading-size ec-transfer-config ec-manager-config",
    ),
    unsupported(
        "expert placement is static, set by --expert-placement",
        "enable-eplb eplb-config expert-placement-strategy",
    ),
    unsupported(
        "batches are not split into overlapped micro-batches",
        "enable-tbo enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold ubatch-size",
    ),
    unsupported(
        "LoRA adapters are not supported",
        "enable-lora lora-modules max-loras max-lora-rank max-cpu-loras max-lora-cls-labels lora-dtype \
         lora-target-modules fully-sharded-loras default-mm-loras enable-mixed-moe-lora-format \
         enable-moe-shared-loras enable-tower-connector-lora specialize-active-lora",
    ),
    unsupported("pipeline parallelism is not supported", "pipeline-parallel-size"),
    unsupported(
        "context parallelism is not supported",
        "decode-context-parallel-size prefill-context-parallel-size dcp-comm-backend \
         dcp-kv-cache-interleave-size dcp-q-replicate cp-kv-cache-interleave-size",
    ),
    unsupported("--speculative-config names the draft model", "spec-model"),
    unsupported(
        "kernels are built in and selected by device and shape",
        "attention-backend attention-config moe-backend linear-backend kernel-config ir-op-priority \
         enable-flashinfer-autotune disable-cascade-attn monokernel use-fp64-gumbel \
         sparse-indexer-topk-backend",
    ),
    unsupported(
        "torch.compile is not used",
        "compilation-config jit-monitor-mode jit-monitor-verbose performance-mode",
    ),
    unsupported(
        "the settings of recurrent states are fixed, apart from --state-checkpoint-interval-tokens",
        "mamba-backend mamba-block-size mamba-cache-dtype \
         mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm \
         enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint gdn-prefill-backend \
         kda-prefill-backend kda-decode-backend use-replayssm replayssm-buffer-len",
    ),
    unsupported(
        "only text models are supported",
        "limit-mm-per-prompt enable-mm-embeds skip-mm-profiling interleave-mm-strings media-io-kwargs \
         mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-processor-device \
         mm-shm-cache-max-object-size-mb mm-tensor-ipc mm-ipc-gpu-memory-gb mm-hasher-algorithm \
         mm-device-do-normalize mm-encoder-only mm-encoder-tp-mode mm-encoder-attn-backend \
         mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path \
         mm-encoder-fp8-scale-save-margin video-pruning-method video-pruning-rate \
         disable-chunked-mm-input allowed-local-media-path allowed-media-domains trust-request-mm-kwargs",
    ),
    unsupported("--runner and --convert select text generation, embeddings or scores", "task"),
    unsupported(
        "text generation, embeddings of whole texts and scores of text pairs are supported",
        "diffusion-config enable-flash-late-interaction",
    ),
    unsupported("prompts are text or token ids", "enable-prompt-embeds skip-tokenizer-init"),
    unsupported("tokenizer files are read by the tokenizers library only", "tokenizer-mode"),
    unsupported("--revision applies to the whole repository", "tokenizer-revision"),
    unsupported(
        "config.json is parsed by built-in code; --hf-overrides overrides members",
        "hf-config-path config-format model-impl engram-config",
    ),
    unsupported(
        "external code is never loaded",
        "code-revision model-class-overrides tool-parser-plugin reasoning-parser-plugin \
         io-processor-plugin logits-processors middleware scheduler-cls worker-cls worker-extension-cls",
    ),
    unsupported("the hub's token comes from HF_TOKEN, or the file token in HF_HOME", "hf-token"),
    unsupported(
        "weight files are always memory-mapped",
        "no-mmap safetensors-load-strategy safetensors-prefetch-block-size \
         safetensors-prefetch-num-threads model-loader-extra-config ignore-patterns pt-load-map-location",
    ),
    unsupported(
        "weights are not offloaded or transferred",
        "cpu-offload-gb cpu-offload-params offload-backend offload-params offload-group-size \
         offload-num-in-group offload-prefetch-step enable-sleep-mode sleep-mode-backend \
         sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator \
         weight-transfer-config enable-shm-tensor-arena",
    ),
    unsupported("preempted requests are recomputed, not swapped", "swap-space"),
    unsupported(
        "threads are scheduled by the system",
        "numa-bind numa-bind-cpus numa-bind-nodes renderer-num-workers",
    ),
    unsupported(
        "steps are limited by --max-num-batched-tokens, --max-num-seqs and --long-prefill-token-threshold only",
        "max-num-active-seqs max-num-scheduled-tokens prefill-schedule-interval \
         long-prefill-token-threshold-adaptive scheduler-reserve-full-isl watermark watermark-config",
    ),
    unsupported(
        "hashing, retention and sharing of KV blocks are fixed, as KV-event consumers expect",
        "prefix-caching-hash-algo prefix-cache-retention-interval prefix-match-unit \
         disable-hybrid-kv-cache-manager disable-sliding-window kv-sharing-fast-prefill \
         swa-bounded-replay kv-cache-dtype-skip-layers",
    ),
    unsupported(
        "each token is streamed immediately; requests may set stream_interval",
        "stream-interval",
    ),
    unsupported(
        "trial renderings determine whether the chat template takes content as a string or as parts",
        "chat-template-content-format",
    ),
    unsupported("replies have the role assistant", "response-role"),
    unsupported(
        "derived from the request and the template",
        "reasoning-effort-map reasoning-config tool-strict-level anthropic-disabled-thinking-effort \
         exclude-tools-when-tool-choice-none",
    ),
    unsupported("tools run on the client", "tool-server"),
    unsupported(
        "sampling defaults are those of generation_config.json, or none",
        "override-generation-config",
    ),
    unsupported("log-probabilities are computed from raw logits", "logprobs-mode"),
    unsupported(
        "the only backend is llguidance",
        "guided-decoding-backend structured-outputs-config",
    ),
    unsupported(
        "reply fields are those of docs/openapi.json",
        "enable-per-request-metrics fingerprint-mode fingerprint-value return-sampling-mask \
         enable-return-routed-experts aux-output-config",
    ),
    unsupported(
        "the routes /cohere/v2/chat and /inference/v1/generate are not implemented; /docs needs no flag",
        "cohere-format cohere-is-reasoning-model tokens-only \
         enable-offline-docs",
    ),
    unsupported("/openapi.json is always enabled", "disable-fastapi-docs"),
    unsupported("only HTTP/1.1 over TCP is supported", "grpc grpc-port uds"),
    unsupported("paths are not rewritten", "root-path"),
    unsupported(
        "request heads are limited to 64 fields and 64 KiB",
        "h11-max-header-count h11-max-incomplete-event-size",
    ),
    unsupported(
        "TLS is not supported; use a TLS proxy",
        "ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh",
    ),
    unsupported(
        "the log is configured by RUST_LOG and --log-format",
        "log-level log-config-file logging-config aggregate-engine-logging",
    ),
    unsupported(
        "the log contains no prompts and no outputs; --trace-requests writes a line per request",
        "enable-log-outputs enable-log-deltas max-log-len log-error-stack \
         enable-logging-iteration-details",
    ),
    unsupported("metrics have vLLM's names", "metrics-sglang"),
    unsupported("all metrics are visible", "show-hidden-metrics-for-version"),
    unsupported("graph replays are counted by hadron:graph_replays_total", "cudagraph-metrics"),
    unsupported("FLOPs per step are not estimated", "enable-mfu-metrics"),
    unsupported(
        "spans of modules are not exported; --profile records steps",
        "collect-detailed-traces profiler-config enable-layerwise-nvtx-tracing \
         enable-trace-replay",
    ),
    unsupported("HADRON_* and VLLM_* variables are not checked", "fail-on-environ-validation"),
    unsupported("there is no platform-specific configuration", "additional-config"),
];
