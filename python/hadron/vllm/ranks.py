"""The tensor-parallel ranks of vLLM."""

from vllm.distributed.parallel_state import get_tp_group

from hadron.ranks import GroupRanks


def tensor_parallel_ranks() -> GroupRanks | None:
    """Returns the ranks that compute the model of this process together; None if it is computed by one rank."""
    group = get_tp_group()
    return GroupRanks(group.cpu_group) if group.world_size > 1 else None
