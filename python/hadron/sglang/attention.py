"""SGLang's attention backend `hadron`: rows and page tables of a step. Attention is part of Hadron's forward pass."""

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from hadron.abi import StepInputs
from hadron.device import current_stream
from hadron.sglang.kv_pool import kv_layers
from hadron.sglang.models.causal_lm import HadronForCausalLM

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class StepRows:
    """Rows of a step. `row_starts` is None if each row has one token."""

    row_starts: torch.Tensor | None
    context_lens: torch.Tensor
    page_tables: torch.Tensor
    decode_rows: int
    max_query_len: int
    max_context_len: int

    def last_tokens(self) -> torch.Tensor | None:
        """Returns the index of the last token of each row, or None if each row has one token."""
        return None if self.row_starts is None else self.row_starts[1:] - 1

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hidden: torch.Tensor,
        output_tokens: torch.Tensor | None = None,
    ) -> StepInputs:
        """Returns the inputs of the step. `hidden` has a row per token, or per token of `output_tokens`."""
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            row_starts=self.row_starts,
            context_lens=self.context_lens,
            block_tables=self.page_tables,
            output_tokens=output_tokens,
            hidden=hidden,
            tokens=len(token_ids),
            rows=len(self.context_lens),
            decode_rows=self.decode_rows,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
            one_token_rows=self.row_starts is None,
            stream=current_stream(hidden.device),
        )


def _row_starts(lens: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
    starts[1:] = lens.cumsum(0)
    return starts


class HadronAttentionBackend(AttentionBackend):
    """Prepares the rows of each step before the forward pass."""

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__()
        if not isinstance(runner.model, HadronForCausalLM):
            name = f"{type(runner.model).__module__}.{type(runner.model).__name__}"
            raise TypeError(f"the attention backend `hadron` serves Hadron's models, but SGLang has loaded {name}")
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.rows: StepRows | None = None
        self._page_tokens = self.token_to_kv_pool.page_size
        self._max_context_len = runner.model_config.context_len
        self._graph_tables = torch.empty(0)
        runner.model.bind_kv(kv_layers(self.token_to_kv_pool), self._page_tokens)

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        """Prepares an eager step."""
        rows = forward_batch.batch_size
        longest = int(forward_batch.seq_lens_cpu[:rows].max()) if rows else 1
        page_tables = self._new_tables(rows, longest, forward_batch.seq_lens.device)
        self._fill_tables(forward_batch.req_pool_indices, page_tables)
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        lens = [1] * rows if is_decode else forward_batch.extend_seq_lens_cpu
        self.rows = StepRows(
            row_starts=None if is_decode else _row_starts(forward_batch.extend_seq_lens),
            context_lens=forward_batch.seq_lens,
            page_tables=page_tables,
            decode_rows=sum(1 for _ in takewhile(lambda length: length == 1, lens)),
            max_query_len=max(lens, default=1),
            max_context_len=longest,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the page tables that captured graphs read."""
        device = self.req_to_token_pool.req_to_token.device
        self._graph_tables = self._new_tables(max_bs, self._max_context_len, device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Rows whose context length is 0 are padding."""
        return 0

    def init_forward_metadata_out_graph(self, forward_batch: "ForwardBatch", in_capture: bool = False) -> None:
        """Prepares a decode step that is captured, or whose graph is replayed."""
        rows = forward_batch.batch_size
        self.rows = StepRows(
            row_starts=None,
            context_lens=forward_batch.seq_lens,
            page_tables=self._graph_tables[:rows],
            decode_rows=rows,
            max_query_len=1,
            max_context_len=self._max_context_len,
        )

    def init_forward_metadata_in_graph(self, forward_batch: "ForwardBatch") -> None:
        """Computes page tables, which is captured."""
        self._fill_tables(forward_batch.req_pool_indices, self._graph_tables[: forward_batch.batch_size])

    def _new_tables(self, rows: int, context_len: int, device: torch.device) -> torch.Tensor:
        width = -(-context_len // self._page_tokens)
        return torch.zeros((rows, width), dtype=torch.int32, device=device)

    def _fill_tables(self, requests: torch.Tensor, page_tables: torch.Tensor) -> None:
        """Writes the pages of requests: page p of a request has the slots of its tokens from p * page_tokens on."""
        first_slots = self.req_to_token_pool.req_to_token[:, :: self._page_tokens][:, : page_tables.shape[1]]
        slots = torch.index_select(first_slots, 0, requests)
        torch.div(slots, self._page_tokens, rounding_mode="floor", out=page_tables)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Is not called."""
        raise NotImplementedError("attention is part of Hadron's forward pass")

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Is not called."""
        raise NotImplementedError("attention is part of Hadron's forward pass")
