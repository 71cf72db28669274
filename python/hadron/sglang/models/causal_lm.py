"""Models that SGLang loads by name. Hadron computes the forward pass and the logits; SGLang does everything else."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_server_args
from torch import nn

from hadron.abi import Model, library_version
from hadron.adapters import ADAPTERS, Adapter
from hadron.device import current_stream, device_name
from hadron.sglang.options import model_options
from hadron.sglang.ranks import tensor_parallel_ranks
from hadron.sglang.register import BACKEND, WAY_BACK
from hadron.sglang.weights import NO_NEW_WEIGHTS

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


class HadronHead(nn.Module):
    """LM head. SGLang calls a head with LoRA methods instead of multiplying by its weight."""

    def __init__(self, model: Model, vocab_size: int) -> None:
        super().__init__()
        self._hadron, self._vocab_size = model, vocab_size

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns logits in float32."""
        shape = (hidden_states.shape[0], self._vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=hidden_states.device)
        self._hadron.logits(current_stream(hidden_states.device), hidden_states, logits)
        return logits

    def set_lora(self, *args: Any, **kwargs: Any) -> None:
        """Is not called: LoRA is refused."""
        raise NotImplementedError("LoRA")

    apply_lora = set_lora


class HadronForCausalLM(nn.Module):
    """A language model of Hadron. Its subclasses have the names of architectures."""

    adapter: ClassVar[Adapter]

    def __init__(self, config: "PretrainedConfig", quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        server_args, architecture = get_server_args(), self.adapter.architecture
        if server_args.attention_backend != BACKEND:
            raise ValueError(f"{architecture} of Hadron needs the attention backend {BACKEND}. {WAY_BACK}")
        self._dtype = torch.get_default_dtype()
        self._hadron = Model(model_options(server_args, config, self._dtype, self.adapter), tensor_parallel_ranks())
        self._description = self._hadron.describe()
        self._has_synthetic_weights = server_args.load_format == "dummy"
        self._has_loaded = False
        self.lm_head = HadronHead(self._hadron, self._description.vocab_size)
        self.logits_processor = LogitsProcessor(config, skip_all_gather=True)
        self._hadron.rehearse()  # SGLang sizes the KV cache by the memory that remains.
        device = device_name(server_args.device)
        logger.info("%s: Hadron %s computes the model on %s", architecture, library_version(), device)

    def bind_kv(self, layers: list[torch.Tensor], page_tokens: int) -> None:
        """Binds the memory of the KV pool."""
        layer, page = self._description.kv_layers[0], layers[0][0]
        if page.element_size() != {"float32": 4, "fp8": 1}.get(layer.dtype, 2):
            raise ValueError(
                f"the KV pool has dtype {page.dtype}, Hadron's model has {layer.dtype}: set --kv-cache-dtype"
            )
        if page.numel() != page_tokens * layer.token_elements():
            raise ValueError(
                f"the KV pool has {page.numel()} elements per page of {page_tokens} tokens, "
                f"this rank of Hadron's model has {layer.token_elements()} per token"
            )
        self._hadron.bind_kv(layers, layers[0].shape[0], page_tokens)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: "ForwardBatch",
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """Returns logits, and what else SGLang derives from hidden states."""
        if input_embeds is not None:
            raise NotImplementedError("inputs of a Hadron model are token ids")
        shape = (len(input_ids), self._description.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=input_ids.device)
        if len(input_ids):
            self._run_step(input_ids, positions, forward_batch, hidden)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def _run_step(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: "ForwardBatch", hidden: torch.Tensor
    ) -> None:
        rows, slots = get_attn_backend().rows, forward_batch.out_cache_loc
        last_tokens = rows.last_tokens() if _reads_last_tokens_only(forward_batch) else None
        if last_tokens is None:
            self._hadron.forward(rows.step(input_ids, positions, slots, hidden))
            return
        last_hidden = torch.empty((len(last_tokens), hidden.shape[1]), dtype=self._dtype, device=hidden.device)
        self._hadron.forward(rows.step(input_ids, positions, slots, last_hidden, last_tokens))
        hidden[last_tokens] = last_hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing at the first call, because Hadron has read the folder. Later calls would change weights."""
        if self._has_loaded or self._has_synthetic_weights:
            raise NotImplementedError(NO_NEW_WEIGHTS)
        self._has_loaded = True


def _reads_last_tokens_only(batch: "ForwardBatch") -> bool:
    """Whether SGLang reads hidden states of the last token of each row only."""
    return (
        batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        and not batch.return_logprob
        and not batch.capture_hidden_mode.is_full()
        and batch.multi_item_delimiter_indices is None
    )


def _model_class(adapter: Adapter) -> type[HadronForCausalLM]:
    return type(adapter.architecture, (HadronForCausalLM,), {"adapter": adapter, "__module__": __name__})


EntryClass = [_model_class(adapter) for adapter in ADAPTERS.values()]
