"""Layers of the KV cache, registered with vLLM, which allocates their memory and binds it to them."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

from hadron.abi import KvLayer, Model, ModelDescription
from hadron.adapters import Adapter
from hadron.vllm.metadata import HadronMetadataBuilder
from hadron.vllm.refusals import BLOCK_MULTIPLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.uint8,
}


class HadronAttention(AttentionImpl):
    """Implementation class that vLLM reads properties of. Attention is part of Hadron's forward pass."""

    supports_dcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Is not called."""
        raise NotImplementedError("attention is part of Hadron's forward pass")


class HadronBackend(AttentionBackend):
    """Layout of layers with keys and values of several heads: [blocks][heads][K, V][block_tokens][head_dim]."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HadronAttention]:
        return HadronAttention

    @staticmethod
    def get_builder_cls() -> type[HadronMetadataBuilder]:
        return HadronMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, 2, block_size, head_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Layouts for vLLM 0.33, which has no `get_kv_cache_shape`: blocks and heads are the outer dimensions."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


class HadronMlaBackend(HadronBackend):
    """Layout of layers with one latent per token: [blocks][block_tokens][width]."""

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


BACKENDS = {"heads": HadronBackend, "mla": HadronMlaBackend}
SPECS = {"heads": FullAttentionSpec, "mla": MLAAttentionSpec}


class HadronKvLayer(AttentionLayerBase):
    """One layer of the KV cache. vLLM sets `kv_cache`."""

    def __init__(self, name: str, layer: KvLayer, heads: int, cache_dtype: str) -> None:
        self.layer_name, self.layer, self.num_heads, self.cache_dtype = name, layer, heads, cache_dtype
        self.num_kv_heads, self.head_size = layer.heads, layer.width
        self.impl, self.attn_type = HadronAttention(), "decoder"
        self.kv_sharing_target_layer_name = None
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return BACKENDS[self.layer.kind]

    def get_kv_cache_spec(self, vllm_config: "VllmConfig") -> FullAttentionSpec:
        return SPECS[self.layer.kind](
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.layer.heads,
            head_size=self.layer.width,
            dtype=DTYPES[self.layer.dtype],
            kv_quant_mode=get_kv_quant_mode(self.cache_dtype),
        )


class HadronKvCache:
    """All layers of a model, and the memory that is bound to the library."""

    def __init__(self, config: "VllmConfig", model: ModelDescription, adapter: Adapter, prefix: str) -> None:
        registry = config.compilation_config.static_forward_context
        names = [f"{prefix}.{adapter.layer_name(i)}".lstrip(".") for i in range(len(model.kv_layers))]
        if taken := [name for name in names if name in registry]:
            raise ValueError(f"vLLM has a layer {taken[0]} already")
        cache_dtype = config.cache_config.cache_dtype
        self.layers = [
            HadronKvLayer(name, layer, model.heads, cache_dtype)
            for name, layer in zip(names, model.kv_layers, strict=True)
        ]
        registry.update(zip(names, self.layers, strict=True))
        # Address and size of each bound tensor. The tensors themselves belong to vLLM, which may free them at any time.
        self._bound: list[tuple[int, int]] = []

    def bind(self, model: Model) -> None:
        """Binds the memory of the layers, if vLLM has allocated it anew."""
        tensors = [layer.kv_cache for layer in self.layers]
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if memory != self._bound:
            blocks = tensors[0].shape[0]
            block_tokens = tensors[0].numel() // (blocks * self.layers[0].layer.token_elements())
            model.bind_kv(tensors, blocks, block_tokens)
            self._bound = memory
