"""The registry of architectures that Hadron computes under a host."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hadron.checkpoint import ModelSettings, refuse_mla_features, refuse_windows
from hadron.refusals import Refusal


@dataclass(frozen=True)
class Adapter:
    """What is particular to an architecture, for every host."""

    architecture: str
    # Properties of the model that are not supported under a host.
    refusals: Callable[[ModelSettings], Iterable[Refusal]]
    # Further options of hadron_open.
    options: Callable[[ModelSettings], Mapping[str, object]]
    # Name of a layer of the KV cache. Hosts find the index of the layer in it.
    layer_name: Callable[[int], str]


def _no_options(_settings: ModelSettings) -> Mapping[str, object]:
    return {}


def _attention_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def _adapter(architecture: str, refusals: Callable[[ModelSettings], Iterable[Refusal]]) -> Adapter:
    return Adapter(architecture, refusals, _no_options, _attention_name)


ADAPTERS: Mapping[str, Adapter] = MappingProxyType(
    {
        adapter.architecture: adapter
        for adapter in (
            _adapter("LlamaForCausalLM", refuse_windows),
            _adapter("MistralForCausalLM", refuse_windows),
            _adapter("Qwen2ForCausalLM", refuse_windows),
            _adapter("Qwen3ForCausalLM", refuse_windows),
            _adapter("Qwen3MoeForCausalLM", refuse_windows),
            _adapter("DeepseekV2ForCausalLM", refuse_mla_features),
            _adapter("DeepseekV3ForCausalLM", refuse_mla_features),
        )
    }
)
