"""Settings of vLLM that Hadron's models do not support."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hadron.adapters import Adapter
from hadron.checkpoint import refuse_quantization
from hadron.refusals import Refusal, rule
from hadron.vllm.options import FP8_CACHE_DTYPES, model_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_MULTIPLE = 16
LOAD_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "dummy")

RULES = (
    rule(
        "LoRA",
        "Hadron's layers have no adapter weights",
        "omit --enable-lora",
        lambda config: config.lora_config is not None,
    ),
    rule(
        "pipeline parallelism",
        "a Hadron model computes all layers",
        "use --pipeline-parallel-size 1",
        lambda config: config.parallel_config.pipeline_parallel_size > 1,
    ),
    rule(
        "models on several hosts",
        "the ranks of a model share memory of one host",
        "use --nnodes 1, or one engine per host with --data-parallel-size",
        lambda config: config.parallel_config.nnodes_within_dp > 1,
    ),
    rule(
        "expert parallelism",
        "each rank holds all experts",
        "omit --enable-expert-parallel and --enable-eplb",
        lambda config: config.parallel_config.enable_expert_parallel or config.parallel_config.enable_eplb,
    ),
    rule(
        "context parallelism",
        "each rank holds the whole context",
        "omit --decode-context-parallel-size and --prefill-context-parallel-size",
        lambda config: (
            config.parallel_config.decode_context_parallel_size > 1
            or config.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
    rule(
        "dual batch overlap",
        "calls with the same model must not overlap",
        "omit --enable-dbo and --ubatch-size",
        lambda config: config.parallel_config.use_ubatching,
    ),
    rule(
        "speculative decoding",
        "Hadron's draft tokens need its own scheduler",
        "omit --speculative-config, or use `hadron serve`",
        lambda config: config.speculative_config is not None,
    ),
    rule(
        "multimodal models",
        "inputs of a Hadron model are token ids",
        "serve a text-only checkpoint",
        lambda config: config.model_config.multimodal_config is not None,
    ),
    rule(
        "prompt embeddings",
        "inputs of a Hadron model are token ids",
        "omit --enable-prompt-embeds",
        lambda config: config.model_config.enable_prompt_embeds,
    ),
    rule(
        "pooling models",
        "Hadron returns hidden states for sampling only",
        "use --runner generate, or `hadron serve --runner pooling`",
        lambda config: config.model_config.runner_type != "generate",
    ),
    rule(
        "--hf-overrides and --hf-config-path",
        "Hadron reads config.json of the model folder",
        "change config.json in a copy of the folder",
        lambda config: config.model_config.hf_overrides or config.model_config.hf_config_path,
    ),
    rule(
        "sleep mode",
        "weights of Hadron are outside vLLM's allocator",
        "omit --enable-sleep-mode",
        lambda config: config.model_config.enable_sleep_mode,
    ),
    rule(
        "weight offloading",
        "Hadron keeps all weights on the device",
        "omit --cpu-offload-gb and --offload-group-size",
        lambda config: (
            config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size
        ),
    ),
    rule(
        "KV connectors and KV offloading",
        "keys and values within a block have Hadron's layout",
        "omit --kv-transfer-config and --kv-offloading-size",
        lambda config: config.kv_transfer_config is not None or config.cache_config.kv_offloading_size is not None,
    ),
    rule(
        "computed KV scales and skipped layers",
        "all layers use the scales of the checkpoint",
        "omit --calculate-kv-scales and --kv-cache-dtype-skip-layers",
        lambda config: config.cache_config.calculate_kv_scales or config.cache_config.kv_cache_dtype_skip_layers,
    ),
    rule(
        "routed experts in outputs",
        "Hadron does not return the choice of experts",
        "omit --enable-return-routed-experts",
        lambda config: config.model_config.enable_return_routed_experts,
    ),
    rule(
        "breakable CUDA graphs",
        "Hadron has no operators at which a graph breaks",
        "unset VLLM_USE_BREAKABLE_CUDAGRAPH",
        lambda _config: _vllm_variable("VLLM_USE_BREAKABLE_CUDAGRAPH"),
    ),
    rule(
        "batch invariance",
        "Hadron chooses kernels by the number of tokens",
        "unset VLLM_BATCH_INVARIANT",
        lambda _config: _vllm_variable("VLLM_BATCH_INVARIANT"),
    ),
)


def refusals(config: "VllmConfig", adapter: Adapter) -> Iterator[Refusal]:
    """Yields all settings of `config` that the model of `adapter` does not support."""
    settings = model_settings(config)
    yield from (known.refusal for known in RULES if known.applies(config))
    yield from adapter.refusals(settings)
    yield from refuse_quantization(settings)
    yield from _refuse_load_format(config)
    yield from _refuse_cache(config, settings.dtype)


def _refuse_load_format(config: "VllmConfig") -> Iterator[Refusal]:
    load_format = config.load_config.load_format
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        yield Refusal(
            f"--load-format {load_format}", "Hadron reads safetensors of the model folder", f"use one of {formats}"
        )


def _refuse_cache(config: "VllmConfig", model_dtype: str) -> Iterator[Refusal]:
    cache = config.cache_config
    if cache.cache_dtype not in ("auto", model_dtype, *FP8_CACHE_DTYPES):
        yield Refusal(
            f"--kv-cache-dtype {cache.cache_dtype}",
            f"KV caches have the dtype of the model ({model_dtype}) or FP8 e4m3",
            "use auto or fp8",
        )
    if cache.block_size % BLOCK_MULTIPLE:
        yield Refusal(
            f"--block-size {cache.block_size}",
            f"blocks have a multiple of {BLOCK_MULTIPLE} tokens",
            f"use a multiple of {BLOCK_MULTIPLE}",
        )


def _vllm_variable(name: str) -> object:
    from vllm import envs

    return getattr(envs, name, False)
