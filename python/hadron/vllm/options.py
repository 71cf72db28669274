"""What vLLM's configuration says about the model and its steps."""

from typing import TYPE_CHECKING, Any

from hadron.adapters import Adapter
from hadron.checkpoint import ModelSettings
from hadron.model_folder import model_folder
from hadron.open_options import StepLimits, open_options
from hadron.vllm.graphs import capture_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")


def model_settings(config: "VllmConfig") -> ModelSettings:
    """Returns the settings on which refusals and options of an architecture depend."""
    model, is_synthetic = config.model_config, config.load_config.load_format == "dummy"
    return ModelSettings(
        config=model.hf_config.to_dict(),
        quantization=model.quantization,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype="fp8" if config.cache_config.cache_dtype in FP8_CACHE_DTYPES else "auto",
        max_model_len=model.max_model_len,
        synthetic_seed=model.seed if is_synthetic else None,
    )


def model_options(config: "VllmConfig", adapter: Adapter, device_type: str) -> dict[str, Any]:
    """Returns the options with which Hadron loads the model of `config`."""
    model, scheduler = config.model_config, config.scheduler_config
    limits = StepLimits(
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_num_rows=scheduler.max_num_seqs,
        block_tokens=config.cache_config.block_size,
        capture_rows=capture_rows(config),
    )
    folder = model_folder(model.model, model.revision, config.load_config.download_dir)
    return open_options(adapter, model_settings(config), limits, folder, device_type)
