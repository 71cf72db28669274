//! Flags of vLLM, SGLang and ATOM that are not ours: those that change nothing here, and those
//! that cannot be honoured yet and say why. Names in kebab case, without dashes in front.

/// A flag that is accepted, changes nothing, and is mentioned in the log.
pub(super) struct Inert {
    pub(super) name: &'static str,
    /// Whether a value follows it.
    pub(super) value: bool,
    /// Why it changes nothing.
    pub(super) because: &'static str,
}

const fn inert(name: &'static str, value: bool, because: &'static str) -> Inert {
    Inert { name, value, because }
}

/// Accepted for compatibility.
pub(super) const INERT: &[Inert] = &[
    inert("trust-remote-code", false, "no code from a model folder is ever executed"),
    inert("enable-auto-tool-choice", false, "always on"),
    inert("enable-chunked-prefill", false, "always on"),
    inert("disable-log-requests", false, "requests are not logged unless traced"),
    inert("enable-log-requests", false, "requests are not logged unless traced"),
    inert("disable-log-stats", false, "statistics are not logged"),
    inert("api-server-count", true, "one process answers all connections"),
    inert("async-scheduling", false, "always on"),
    inert("distributed-executor-backend", true, "executors are chosen by device"),
    inert("uvicorn-log-level", true, "there is no uvicorn"),
    inert("disable-uvicorn-access-log", false, "there is no uvicorn"),
    inert("timeout-keep-alive", true, "idle connections close after 60 s"),
    inert("level", true, "there are no compilation levels"),
];

/// A flag that would change behaviour which this release does not have.
pub(super) struct Foreign {
    pub(super) name: &'static str,
    pub(super) because: &'static str,
}

const fn foreign(name: &'static str, because: &'static str) -> Foreign {
    Foreign { name, because }
}

const KV_RESIDENCE: &str = "how long blocks stay in the cache is not sampled";
const ONE_MACHINE: &str = "this release runs on one machine";
const QUANTISE: &str = "weights are served as the checkpoint stores them";

/// Refused, each with its reason.
pub(super) const FOREIGN: &[Foreign] = &[
    foreign("quantization", QUANTISE),
    foreign("online-quant-config", QUANTISE),
    foreign("kv-transfer-config", "KV blocks are not moved between servers"),
    foreign("enable-eplb", "experts are not rebalanced"),
    foreign("enable-tbo", "batches are not overlapped in pairs"),
    foreign(
        "all2all-backend",
        "tokens stay where they are: each rank computes the experts it holds",
    ),
    foreign("enable-lora", "adapters are not loaded"),
    foreign("pipeline-parallel-size", "layers are not split over devices"),
    foreign("decode-context-parallel-size", "one context is not split over devices"),
    foreign("prefill-context-parallel-size", "one context is not split over devices"),
    foreign("speculative-config", "this release does not speculate"),
    foreign("spec-tokens", "this release does not speculate"),
    foreign("num-speculative-tokens", "this release does not speculate"),
    foreign("data-parallel-size-local", ONE_MACHINE),
    foreign("data-parallel-start-rank", ONE_MACHINE),
    foreign("data-parallel-address", ONE_MACHINE),
    foreign("data-parallel-rpc-port", ONE_MACHINE),
    foreign("headless", ONE_MACHINE),
    foreign("master-addr", ONE_MACHINE),
    foreign("master-port", ONE_MACHINE),
    foreign("dist-init-addr", ONE_MACHINE),
    foreign("cluster-secret-file", ONE_MACHINE),
    foreign(
        "device-ids",
        "the first visible GPUs are used; CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES choose",
    ),
    foreign("cudagraph-capture-sizes", "row counts to capture follow from --max-num-seqs"),
    foreign("state-checkpoint-interval-tokens", "no served model has recurrent state"),
    foreign("metrics-sglang", "metrics have vLLM's names"),
    foreign("kv-cache-metrics", KV_RESIDENCE),
    foreign("kv-cache-metrics-sample", KV_RESIDENCE),
    foreign("show-hidden-metrics-for-version", "no metric is hidden"),
    foreign("enable-mfu-metrics", "floating-point work per step is not estimated"),
    foreign("otlp-traces-endpoint", "spans are not exported; --profile records steps"),
    foreign("no-mmap", "tensor files are always mapped"),
    foreign("swap-space", "preempted requests are recomputed, not swapped"),
    foreign("cpu-offload-gb", "weights stay where they are loaded"),
    foreign("guided-decoding-backend", "llguidance is the one there is"),
    foreign("ssl-keyfile", "TLS ends in front of the server"),
    foreign("ssl-certfile", "TLS ends in front of the server"),
    foreign("tokenizer-mode", "tokenizer.json is read by the one library there is"),
    foreign("limit-mm-per-prompt", "models read text only"),
    foreign("task", "models generate text"),
    foreign("runner", "models generate text"),
];
