"""Ranks of a tensor-parallel model that communicate through a process group of torch."""

import torch
from torch import distributed


class GroupRanks:
    """The processes of a group whose backend gathers tensors on CPUs, such as gloo."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._group = group

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns the bytes of all processes, in rank order."""
        tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(gathered, tensor, group=self._group)
        return [bytes(part.tolist()) for part in gathered]
