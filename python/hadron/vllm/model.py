"""Models that vLLM loads by name. Hadron computes the forward pass and the logits; vLLM does everything else."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform

from hadron.abi import Model, library_version
from hadron.adapters import ADAPTERS, Adapter
from hadron.device import current_stream, device_name
from hadron.refusals import reject
from hadron.vllm.kv_layers import HadronKvCache
from hadron.vllm.metadata import HadronMetadata
from hadron.vllm.options import model_options
from hadron.vllm.ranks import tensor_parallel_ranks
from hadron.vllm.refusals import refusals
from hadron.vllm.register import WAY_BACK

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

NO_NEW_WEIGHTS = (
    "Hadron's models cannot receive new weights: start vLLM with the folder of the new weights, or without Hadron. "
    + WAY_BACK
)


class HadronForCausalLM(nn.Module):
    """A language model of Hadron. Its subclasses have the names of architectures."""

    adapter: ClassVar[Adapter]

    def __init__(self, *, vllm_config: "VllmConfig", prefix: str = "") -> None:
        super().__init__()
        architecture = self.adapter.architecture
        reject(architecture, refusals(vllm_config, self.adapter), WAY_BACK)
        device_type = current_platform.device_type
        self._hadron = Model(model_options(vllm_config, self.adapter, device_type), tensor_parallel_ranks())
        self._description = self._hadron.describe()
        self._kv_cache = HadronKvCache(vllm_config, self._description, self.adapter, prefix)
        self._dtype = vllm_config.model_config.dtype
        self._has_synthetic_weights = vllm_config.load_config.load_format == "dummy"
        self._has_loaded = False
        self._has_rehearsed = False
        logger.info("%s: Hadron %s computes the model on %s", architecture, library_version(), device_name(device_type))

    @staticmethod
    def get_model_state_cls() -> type:
        """Returns the class of request states in vLLM's second model runner."""
        from hadron.vllm.model_state import HadronModelState

        return HadronModelState

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Is not called: inputs of a Hadron model are token ids."""
        raise NotImplementedError("inputs of a Hadron model are token ids")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        last_tokens_only: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns hidden states after the final norm.

        Those of padding are not defined, and with `last_tokens_only` only those of the last token of each row are.
        """
        shape = (positions.shape[-1], self._description.hidden_size)
        self._rehearse()
        metadata = self._metadata()
        if metadata is None:  # A profile run, before vLLM allocates the KV cache.
            return torch.zeros(shape, dtype=self._dtype, device=positions.device)
        hidden = torch.empty(shape, dtype=self._dtype, device=positions.device)
        self._kv_cache.bind(self._hadron)
        if metadata.common.num_actual_tokens == 0:
            return hidden
        last_tokens = metadata.last_tokens() if last_tokens_only else None
        if last_tokens is None:
            self._hadron.forward(metadata.step(input_ids, positions, hidden))
            return hidden
        last_hidden = torch.empty((len(last_tokens), hidden.shape[1]), dtype=self._dtype, device=positions.device)
        self._hadron.forward(metadata.step(input_ids, positions, last_hidden, last_tokens))
        hidden[last_tokens] = last_hidden
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns logits in float32."""
        shape = (hidden_states.shape[0], self._description.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=hidden_states.device)
        self._hadron.logits(current_stream(hidden_states.device), hidden_states, logits)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Does nothing at the first call, because Hadron has read the folder. Later calls would change weights."""
        if self._has_loaded or self._has_synthetic_weights:
            raise NotImplementedError(NO_NEW_WEIGHTS)
        self._has_loaded = True
        return set()

    def _metadata(self) -> HadronMetadata | None:
        by_layer = get_forward_context().attn_metadata
        return by_layer[self._kv_cache.layers[0].layer_name] if by_layer else None

    def _rehearse(self) -> None:
        if not self._has_rehearsed:
            self._hadron.rehearse()
            self._has_rehearsed = True


def _model_class(adapter: Adapter) -> type[HadronForCausalLM]:
    return type(adapter.architecture, (HadronForCausalLM,), {"adapter": adapter, "__module__": __name__})


globals().update({architecture: _model_class(adapter) for architecture, adapter in ADAPTERS.items()})
