"""What SGLang's arguments say about the model and its steps."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend

from hadron.adapters import Adapter
from hadron.checkpoint import ModelSettings
from hadron.model_folder import model_folder
from hadron.open_options import StepLimits, open_options

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig

FP8_CACHE_DTYPE = "fp8_e4m3"
# SGLang limits the number of running requests to at most this value if the user does not. The exact limit depends on
# the size of the KV pool, which is allocated after the model is opened.
MAX_ROWS = 4096
# SGLang runs at most one request per this number of tokens of the KV pool.
MIN_TOKENS_PER_ROW = 2


def model_settings(server_args: "ServerArgs", hf_config: "PretrainedConfig", dtype: torch.dtype) -> ModelSettings:
    """Returns the settings on which refusals and options of an architecture depend."""
    return ModelSettings(
        config=hf_config.to_dict(),
        quantization=server_args.quantization,
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_dtype="fp8" if server_args.kv_cache_dtype == FP8_CACHE_DTYPE else "auto",
        max_model_len=server_args.get_model_config().context_len,
        synthetic_seed=server_args.random_seed if server_args.load_format == "dummy" else None,
    )


def model_options(
    server_args: "ServerArgs", hf_config: "PretrainedConfig", dtype: torch.dtype, adapter: Adapter
) -> dict[str, Any]:
    """Returns the options with which Hadron loads the model."""
    settings = model_settings(server_args, hf_config, dtype)
    folder = model_folder(server_args.model_path, server_args.revision, server_args.download_dir)
    return open_options(adapter, settings, _step_limits(server_args, settings), folder, server_args.device)


def _step_limits(server_args: "ServerArgs", settings: ModelSettings) -> StepLimits:
    rows = server_args.max_running_requests or MAX_ROWS
    if server_args.max_total_tokens is not None:
        rows = min(rows, max(server_args.max_total_tokens // MIN_TOKENS_PER_ROW, 1))
    chunk = server_args.chunked_prefill_size
    prompts = chunk if chunk and chunk > 0 else max(server_args.max_prefill_tokens, settings.max_model_len)
    tokens = prompts + (rows if server_args.enable_mixed_chunk else 0)
    decode = server_args.cuda_graph_config.decode
    sizes = decode.bs or () if decode.backend != Backend.DISABLED else ()
    capture_rows = tuple(size for size in sizes if size <= rows)
    return StepLimits(max(tokens, rows), rows, server_args.page_size, capture_rows)
