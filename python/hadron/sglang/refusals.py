"""Settings of SGLang that Hadron's models do not support."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend

from hadron.adapters import Adapter
from hadron.checkpoint import refuse_quantization
from hadron.refusals import Refusal, rule
from hadron.sglang.options import FP8_CACHE_DTYPE, model_settings
from hadron.sglang.register import BACKEND

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

BLOCK_MULTIPLE = 16
LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "dummy")
CACHE_DTYPES = ("auto", FP8_CACHE_DTYPE)

RULES = (
    rule(
        "LoRA",
        "Hadron's layers have no adapter weights",
        "omit --enable-lora and --lora-paths",
        lambda args: args.enable_lora or args.lora_paths,
    ),
    rule(
        "pipeline parallelism",
        "a Hadron model computes all layers",
        "use --pp-size 1",
        lambda args: args.pp_size > 1,
    ),
    rule(
        "models on several hosts",
        "the ranks of a model share memory of one host",
        "use --nnodes 1",
        lambda args: args.nnodes > 1,
    ),
    rule(
        "expert parallelism and DP attention",
        "each rank holds all weights and its own requests",
        "omit --ep-size, --enable-eplb and --enable-dp-attention",
        lambda args: args.ep_size > 1 or args.enable_eplb or args.enable_dp_attention,
    ),
    rule(
        "context parallelism",
        "each rank holds the whole context",
        "omit --attn-cp-size and --dcp-size",
        lambda args: args.attn_cp_size > 1 or args.dcp_size > 1,
    ),
    rule(
        "overlapping forward passes",
        "calls with the same model must not overlap",
        "omit --enable-two-batch-overlap, --enable-single-batch-overlap and --enable-pdmux",
        lambda args: args.enable_two_batch_overlap or args.enable_single_batch_overlap or args.enable_pdmux,
    ),
    rule(
        "speculative decoding and diffusion models",
        "Hadron's draft tokens need its own scheduler",
        "omit --speculative-algorithm and --dllm-algorithm, or use `hadron serve`",
        lambda args: args.speculative_algorithm or args.dllm_algorithm,
    ),
    rule(
        "prefill-decode disaggregation and KV offloading",
        "keys and values within a page have Hadron's layout",
        "omit --disaggregation-mode, --enable-hierarchical-cache and --enable-lmcache",
        lambda args: args.disaggregation_mode != "null" or args.enable_hierarchical_cache or args.enable_lmcache,
    ),
    rule(
        "other layouts of the KV cache",
        "keys and values within a page have Hadron's layout",
        "omit --enable-unified-memory, --enable-page-major-kv-layout and --enable-hisparse",
        lambda args: args.enable_unified_memory or args.enable_page_major_kv_layout or args.enable_hisparse,
    ),
    rule(
        "weight offloading and the memory saver",
        "weights of Hadron are outside SGLang's allocator",
        "omit --cpu-offload-gb, --offload-group-size and --enable-memory-saver",
        lambda args: args.cpu_offload_gb > 0 or args.offload_group_size > 0 or args.enable_memory_saver,
    ),
    rule(
        "torch.compile and torchao",
        "Hadron's kernels are not operators of torch",
        "omit --enable-torch-compile and --torchao-config",
        lambda args: args.enable_torch_compile or args.torchao_config,
    ),
    rule(
        "embeddings and multi-item scoring",
        "Hadron returns hidden states for sampling only",
        "omit --is-embedding and --enable-mis, or use `hadron serve --runner pooling`",
        lambda args: args.is_embedding or args.enable_mis,
    ),
    rule(
        "--json-model-override-args",
        "Hadron reads config.json of the model folder",
        "change config.json in a copy of the folder",
        lambda args: args.json_model_override_args not in ("", "{}"),
    ),
    rule(
        "routed experts in outputs",
        "Hadron does not return the choice of experts",
        "omit --enable-return-routed-experts",
        lambda args: args.enable_return_routed_experts,
    ),
    rule(
        "deterministic inference",
        "Hadron chooses kernels by the number of tokens",
        "omit --enable-deterministic-inference",
        lambda args: args.enable_deterministic_inference,
    ),
    rule(
        "an attention backend of SGLang",
        "attention is part of Hadron's forward pass",
        "omit --attention-backend, --prefill-attention-backend and --decode-attention-backend",
        lambda args: (
            args.prefill_attention_backend
            or args.decode_attention_backend
            # SGLang sets a backend on CPUs before models can declare theirs.
            or (args.device != "cpu" and args.attention_backend not in (None, BACKEND))
        ),
    ),
    rule(
        "breakable CUDA graphs",
        "Hadron has no operators at which a graph breaks",
        "use --cuda-graph-backend-decode full",
        lambda args: args.cuda_graph_config.decode.backend not in (Backend.FULL, Backend.DISABLED),
    ),
    rule(
        "KV cache sizing after graphs are captured",
        "the memory of a layer is one array",
        "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        lambda _args: envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
    ),
)


def refusals(server_args: "ServerArgs", hf_config: "PretrainedConfig", adapter: Adapter) -> Iterator[Refusal]:
    """Yields all arguments that the model of `adapter` does not support."""
    settings = model_settings(server_args, hf_config, torch.get_default_dtype())
    yield from (known.refusal for known in RULES if known.applies(server_args))
    yield from adapter.refusals(settings)
    yield from refuse_quantization(settings)
    yield from _refuse_load_format(server_args)
    yield from _refuse_cache(server_args)


def _refuse_load_format(server_args: "ServerArgs") -> Iterator[Refusal]:
    load_format = server_args.load_format
    if load_format not in LOAD_FORMATS:
        formats = ", ".join(LOAD_FORMATS)
        yield Refusal(
            f"--load-format {load_format}", "Hadron reads safetensors of the model folder", f"use one of {formats}"
        )


def _refuse_cache(server_args: "ServerArgs") -> Iterator[Refusal]:
    if server_args.kv_cache_dtype not in CACHE_DTYPES:
        yield Refusal(
            f"--kv-cache-dtype {server_args.kv_cache_dtype}",
            "KV caches have the dtype of the model or FP8 e4m3",
            f"use {' or '.join(CACHE_DTYPES)}",
        )
    if server_args.page_size is not None and server_args.page_size % BLOCK_MULTIPLE:
        yield Refusal(
            f"--page-size {server_args.page_size}",
            f"pages have a multiple of {BLOCK_MULTIPLE} tokens",
            f"use a multiple of {BLOCK_MULTIPLE}",
        )
