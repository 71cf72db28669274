"""Options of hadron_open, which are the same for every host."""

from dataclasses import dataclass
from pathlib import Path

from hadron.adapters import Adapter
from hadron.checkpoint import ModelSettings
from hadron.device import device_options
from hadron.environment import read_environment


@dataclass(frozen=True)
class StepLimits:
    """Largest steps of a host, tokens of its KV blocks, and the row counts of the steps that it captures as graphs."""

    max_num_tokens: int
    max_num_rows: int
    block_tokens: int
    capture_rows: tuple[int, ...]


def open_options(
    adapter: Adapter, settings: ModelSettings, limits: StepLimits, folder: Path, device_type: str
) -> dict[str, object]:
    """Returns the options with which Hadron loads a model."""
    environment = read_environment()
    options = {
        "model_dir": str(folder),
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "max_model_len": settings.max_model_len,
        "max_num_tokens": limits.max_num_tokens,
        "max_num_rows": limits.max_num_rows,
        "block_tokens": limits.block_tokens,
        "capture_rows": limits.capture_rows,
    }
    if settings.synthetic_seed is not None:
        options |= {"load_format": "synth", "seed": settings.synthetic_seed}
    if environment.threads is not None:
        options["threads"] = environment.threads
    return options | device_options(device_type, environment) | adapter.options(settings)
