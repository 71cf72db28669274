"""CUDA graphs of vLLM: which steps are captured, and how a captured step is recognised."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def capture_rows(config: "VllmConfig") -> tuple[int, ...]:
    """Returns the row counts of the decode steps that vLLM captures. Other steps are launched eagerly."""
    compilation = config.compilation_config
    if config.model_config.enforce_eager or not compilation.cudagraph_mode.has_full_cudagraphs():
        return ()
    most = config.scheduler_config.max_num_seqs
    return tuple(sorted(size for size in compilation.cudagraph_capture_sizes or () if size <= most))


def is_one_token_step(tokens: int, rows: int, max_query_len: int) -> bool:
    """Whether row r of a step has one token, with index r. This holds for all captured steps, with their padding."""
    return max_query_len == 1 and tokens == rows
