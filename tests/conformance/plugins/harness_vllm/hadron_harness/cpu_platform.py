"""vLLM's CPU platform without the kernels that the GPU wheel does not contain."""

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class HarnessPlatform(CpuPlatform):
    """Serves models that need none of vLLM's own kernels."""

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing, because the wheel has no CPU kernels."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Keeps block size and chunked prefill as on GPUs, and runs a single worker in the process of the engine."""
        from vllm.config import CompilationMode

        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        block_size = cache.block_size
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = kept
        cache.block_size = block_size
        vllm_config.compilation_config.mode = CompilationMode.NONE
        # Workers share all cores: by default, each needs a NUMA node of its own.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        executor = "uni" if vllm_config.parallel_config.world_size == 1 else "mp"
        vllm_config.parallel_config.distributed_executor_backend = executor
