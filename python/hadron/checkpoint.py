"""Refusals that depend on the checkpoint. They hold under every host."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hadron.refusals import Refusal

# Values of `quantization_config.quant_method` that Hadron reads, if the weights are FP8.
FP8_METHODS = ("fp8", "compressed-tensors", "modelopt")


@dataclass(frozen=True)
class ModelSettings:
    """A checkpoint, and the settings of the host for it."""

    # config.json
    config: Mapping[str, Any]
    # Quantisation that the user requested.
    quantization: str | None
    # Type of weights and activations: "float32", "bfloat16" or "float16".
    dtype: str
    # Type of the KV cache: "auto" or "fp8".
    kv_cache_dtype: str
    # Longest context.
    max_model_len: int
    # Seed of synthetic weights; None = the weights of the checkpoint.
    synthetic_seed: int | None


def refuse_windows(settings: ModelSettings) -> Iterator[Refusal]:
    """Refuses sliding windows that are shorter than contexts: hosts bind KV caches as layers with full attention."""
    config = settings.config
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and window < settings.max_model_len:
        yield Refusal(
            f"sliding windows of {window} tokens",
            "layers of the KV cache have full attention",
            f"use --max-model-len {window}, or `hadron serve`",
        )


def refuse_mla_features(settings: ModelSettings) -> Iterator[Refusal]:
    """Refuses FP8 latents, and the indexer of DeepSeek Sparse Attention."""
    if settings.kv_cache_dtype == "fp8":
        yield Refusal("an FP8 KV cache", "latents of MLA have the dtype of the model", "use --kv-cache-dtype auto")
    if "index_topk" in settings.config:
        yield Refusal(
            "sparse attention", "Hadron has no indexer (`index_topk`)", "serve a checkpoint without an indexer"
        )


def refuse_quantization(settings: ModelSettings) -> Iterator[Refusal]:
    """Refuses weights that are neither FP8 nor unquantised, and quantisation while weights are loaded."""
    stored = settings.config.get("quantization_config") or {}
    method = stored.get("quant_method")
    if settings.quantization is not None and method is None:
        yield Refusal(
            f"--quantization {settings.quantization}",
            "Hadron does not quantise weights while it loads them",
            "serve an FP8 checkpoint, or omit --quantization",
        )
    elif method is not None and not (method in FP8_METHODS and _has_fp8_weights(stored)):
        yield Refusal(
            f"weights quantised with {method}",
            "Hadron reads FP8 weights with scales per block, channel or tensor",
            "serve an FP8 checkpoint, or the unquantised weights",
        )


def _has_fp8_weights(stored: Mapping[str, Any]) -> bool:
    groups = stored.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") or {} for group in groups.values()]
        return all(weight.get("type") == "float" and weight.get("num_bits") == 8 for weight in weights)
    algorithm = stored.get("quant_algo")
    return algorithm in (None, "MIXED_PRECISION") or str(algorithm).startswith("FP8")
