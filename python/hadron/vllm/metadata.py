"""Attention metadata of vLLM as inputs of a Hadron step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from hadron.abi import StepInputs
from hadron.device import current_stream
from hadron.vllm.graphs import is_one_token_step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True)
class HadronMetadata:
    """Rows of a step. Padding behind the last row or token is not part of them, unless the step is a captured graph."""

    common: CommonAttentionMetadata
    decode_rows: int

    def last_tokens(self) -> torch.Tensor | None:
        """Returns the index of the last token of each row, or None if each row has one token."""
        if self.decode_rows == self.common.num_reqs:
            return None
        return self.common.query_start_loc[1 : self.common.num_reqs + 1] - 1

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        output_tokens: torch.Tensor | None = None,
    ) -> StepInputs:
        """Returns the inputs of the step. `hidden` has a row per token, or per token of `output_tokens`."""
        common, tokens = self.common, self.common.num_actual_tokens
        return StepInputs(
            token_ids=token_ids[:tokens],
            positions=positions[:tokens],
            slots=common.slot_mapping[:tokens],
            row_starts=common.query_start_loc,
            context_lens=common.seq_lens,
            block_tables=common.block_table_tensor,
            output_tokens=output_tokens,
            hidden=hidden[:tokens] if output_tokens is None else hidden,
            tokens=tokens,
            rows=common.num_reqs,
            decode_rows=self.decode_rows,
            max_query_len=common.max_query_len,
            max_context_len=common.max_seq_len,
            one_token_rows=is_one_token_step(tokens, common.num_reqs, common.max_query_len),
            stream=current_stream(hidden.device),
        )


class HadronMetadataBuilder(AttentionMetadataBuilder[HadronMetadata]):
    """Builds the metadata of a step. Cascade attention is never used, which is the default of the base class."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: "AttentionSpec", layer_names: list[str], vllm_config: "VllmConfig", device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HadronMetadata:
        """Counts the first rows with one token; vLLM sorts rows so that these come first."""
        rows = common_attn_metadata.num_reqs
        lengths = np.diff(common_attn_metadata.query_start_loc_cpu[: rows + 1].numpy())
        longer = np.flatnonzero(lengths != 1)
        return HadronMetadata(common_attn_metadata, int(longer[0]) if longer.size else rows)
