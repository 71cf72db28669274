"""SGLang's KV pools as layers of Hadron. MLA pools have Hadron's layout, pools of KV heads get it by a hook."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hadron.sglang.register import BACKEND

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool

BUFFERS_TARGET = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"


def create_buffers(original: Callable[["MHATokenToKVPool"], None], pool: "MHATokenToKVPool") -> None:
    """Allocates one array per layer, [pages][heads][K, V][page_tokens][head_dim], of which the buffers are views."""
    from sglang.srt.runtime_context import get_server_args

    if get_server_args().attention_backend != BACKEND:
        original(pool)
        return
    pages = (pool.size + pool.page_size) // pool.page_size
    shape = (pages, pool.head_num, 2, pool.page_size, pool.head_dim)
    layers = [torch.zeros(shape, dtype=pool.store_dtype, device=pool.device) for _ in range(pool.layer_num)]
    pool.k_buffer = [layer[:, :, 0] for layer in layers]
    pool.v_buffer = [layer[:, :, 1] for layer in layers]


def kv_layers(pool: "KVCache") -> list[torch.Tensor]:
    """Returns the array of each layer: its first dimension is the page, and it is contiguous."""
    page_tokens = pool.page_size
    if latents := getattr(pool, "kv_buffer", None):
        pages = latents[0].shape[0] // page_tokens
        return [latent[: pages * page_tokens].view(pages, -1) for latent in latents]
    return [_whole_layer(keys, values) for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True)]


def _whole_layer(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tile = keys[0, 0].numel()
    if (
        keys.ndim != 4
        or keys.stride(1) != 2 * tile
        or values.data_ptr() - keys.data_ptr() != tile * keys.element_size()
    ):
        raise ValueError(f"the KV pool of SGLang was not allocated by Hadron's hook of {BUFFERS_TARGET}")
    pages, heads, page_tokens, head_dim = keys.shape
    strides = (2 * heads * tile, 2 * tile, tile, head_dim, 1)
    return keys.as_strided((pages, heads, 2, page_tokens, head_dim), strides)
