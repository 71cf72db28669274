"""Requests of vLLM's second model runner, which selects hidden states after the forward pass."""

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class HadronModelState(DefaultModelState):
    """Finds the steps of which vLLM reads hidden states of last tokens only: those without prompt log-probabilities."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_prompt_logprobs: set[str] = set()

    def add_request(self, req_index: int, new_req_data: "NewRequestData") -> None:
        """Records whether the request asks for prompt log-probabilities."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        if params is None or params.prompt_logprobs is not None:
            self._with_prompt_logprobs.add(new_req_data.req_id)

    def remove_request(self, req_id: str) -> None:
        """Forgets a request."""
        super().remove_request(req_id)
        self._with_prompt_logprobs.discard(req_id)

    def prepare_inputs(self, input_batch: "InputBatch", req_states: "RequestState") -> dict[str, Any]:
        """Returns arguments of the model's forward method."""
        last_tokens_only = self._with_prompt_logprobs.isdisjoint(input_batch.req_ids)
        return {**super().prepare_inputs(input_batch, req_states), "last_tokens_only": last_tokens_only}
