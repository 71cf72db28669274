"""Updates of weights while SGLang serves, as in reinforcement learning. Hadron's models do not support them."""

from collections.abc import Callable
from typing import Any

from hadron.sglang.register import BACKEND, WAY_BACK

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
UPDATE_TARGETS = tuple(
    f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")
)
NO_NEW_WEIGHTS = (
    "Hadron's models cannot receive new weights: start SGLang with the folder of the new weights, or without Hadron. "
    + WAY_BACK
)


def refuse_update(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Answers that the update failed, before anything is changed."""
    from sglang.srt.runtime_context import get_server_args

    if get_server_args().attention_backend != BACKEND:
        return original(*args, **kwargs)
    return False, NO_NEW_WEIGHTS
