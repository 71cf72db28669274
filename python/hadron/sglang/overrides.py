"""Settings that SGLang takes over for Hadron's architectures, after those that Hadron does not support are refused."""

from typing import TYPE_CHECKING, Any

from hadron.adapters import ADAPTERS
from hadron.refusals import reject
from hadron.requirement import no_model, stop
from hadron.sglang.refusals import BLOCK_MULTIPLE, refusals
from hadron.sglang.register import BACKEND, WAY_BACK

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from transformers import PretrainedConfig


def server_overrides(server_args: "ServerArgs", hf_config: "PretrainedConfig") -> dict[str, Any]:
    """Selects Hadron's attention backend, and pages of a size that its kernels have."""
    adapter = ADAPTERS[hf_config.architectures[0]]
    reject(adapter.architecture, refusals(server_args, hf_config, adapter), WAY_BACK)
    return {"attention_backend": BACKEND, "page_size": server_args.page_size or BLOCK_MULTIPLE}


def require_architecture(_server_args: "ServerArgs", hf_config: "PretrainedConfig") -> dict[str, Any]:
    """Ends the process for an architecture that Hadron has no model for."""
    stop(no_model(hf_config.architectures[0]))
