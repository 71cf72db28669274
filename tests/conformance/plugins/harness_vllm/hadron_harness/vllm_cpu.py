"""Entry points of the harness for vLLM: the platform, and operators that the CPU worker calls."""

from itertools import pairwise

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def platform() -> str:
    """Names the platform class."""
    return "hadron_harness.cpu_platform.HarnessPlatform"


def register_operators() -> None:
    """Registers the operators, unless the process has them already."""
    _register("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None)
    _register(
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, int block_size) -> ()",
        _compute_slot_mapping,
    )
    _register("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1))


def _register(schema: str, function) -> None:
    name = schema.partition("(")[0]
    if not hasattr(torch.ops._C, name):
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def _compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size: int) -> None:
    slot_mapping.fill_(-1)
    starts = query_start_loc.tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        at = positions[start:end]
        blocks = block_table[row, at // block_size].to(torch.int64)
        slot_mapping[start:end] = blocks * block_size + at % block_size
