#!/usr/bin/env python3
"""vLLM with Hadron's models in one process, on a CPU: registration, refusals, and what engines generate."""

import contextlib
import copy
import gc
import io
import logging
import os
import tempfile
import unittest
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# vLLM reads these variables when it is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
}

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_plugins_by_group
from vllm.sampling_params import StructuredOutputsParams

from abi_checks import Sequence, open_model
from golden import DEMO, STEPS, Golden, questions, read_golden
from hadron import abi
from hadron.adapters import ADAPTERS
from hadron.vllm import refusals, register
from hadron.vllm.model import HadronForCausalLM
from hadron.vllm.model_state import HadronModelState

GROUP = "vllm.general_plugins"
LIMITS = {
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "enforce_eager": True,
}
KV_CACHE = {"kv_cache_memory_bytes": 64 << 20}
FIXTURES = (
    "qwen3-tied",
    "qwen3-d128-gqa4",
    "qwen3-fp8-channels",
    "qwen3_moe-plain-tied",
    "qwen2-tied-d64-gqa8",
    "llama-tied-llama3",
    "mistral-untied",
    "deepseek_v2-groups-yarn",
    "deepseek_v3-groups-yarn",
)


@contextlib.contextmanager
def engine(model: Path, **settings) -> Iterator[LLM]:
    """An engine that is freed at the end."""
    llm = LLM(model=str(model), disable_log_stats=False, **(LIMITS | KV_CACHE | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def golden_engine(golden: Golden, **settings) -> contextlib.AbstractContextManager[LLM]:
    """An engine with the synthetic weights of a fixture in f32."""
    synthetic = {"load_format": "dummy", "seed": golden.seed, "skip_tokenizer_init": True, "dtype": "float32"}
    return engine(golden.folder, **(synthetic | settings))


def greedy(llm: LLM, prompts: list[list[int]], **settings) -> list[list[int]]:
    """Returns the greedy continuations of prompts, all of which run together."""
    parameters = SamplingParams(
        **({"temperature": 0, "max_tokens": STEPS, "ignore_eos": True, "detokenize": False} | settings)
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def metric(llm: LLM, name: str) -> int:
    """Returns the value of a counter of the engine."""
    return next(int(found.value) for found in llm.get_metrics() if found.name == f"vllm:{name}")


class FolderTest(unittest.TestCase):
    """Tests that write model folders."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)


class RegistrationTest(FolderTest):
    """The entry point and the model registry."""

    def setUp(self) -> None:
        self.enterContext(mock.patch.dict(ModelRegistry.models))

    def registered(self, architecture: str = "Qwen3ForCausalLM") -> str:
        """Returns the module that the registry has for an architecture."""
        return ModelRegistry.models[architecture].module_name

    def test_plugin_is_discovered(self) -> None:
        found = {point.name: point.value for point in entry_points(group=GROUP)}
        self.assertEqual(found["hadron"], "hadron.vllm.register:register")
        self.assertIs(load_plugins_by_group(GROUP)["hadron"], register.register)

    def test_allow_list_is_respected(self) -> None:
        for allowed, loaded in (("hadron", True), ("hadron,other", True), ("other", False), ("", False)):
            with mock.patch.dict(os.environ, VLLM_PLUGINS=allowed):
                self.assertEqual("hadron" in load_plugins_by_group(GROUP), loaded, allowed)

    def test_models_replace_those_of_vllm_and_can_be_registered_again(self) -> None:
        ModelRegistry.register_model("Qwen3ForCausalLM", "vllm.model_executor.models.qwen3:Qwen3ForCausalLM")
        with mock.patch.dict(os.environ, HADRON_DISABLE_VLLM_PLUGIN="1"):
            register.register()
        self.assertEqual(self.registered(), "vllm.model_executor.models.qwen3")
        register.register()
        models = dict(ModelRegistry.models)
        register.register()
        self.assertEqual(ModelRegistry.models, models)
        for architecture in ADAPTERS:
            self.assertEqual(self.registered(architecture), "hadron.vllm.model")
            self.assertEqual(models[architecture].load_model_cls().__name__, architecture)
        self.assertEqual(self.registered("GPT2LMHeadModel"), "vllm.model_executor.models.gpt2")

    def test_class_is_inspected_in_a_process_of_its_own(self) -> None:
        register.register()
        with mock.patch.dict(os.environ, VLLM_CACHE_ROOT=str(self.folder)):
            found = ModelRegistry.models["Qwen3MoeForCausalLM"].inspect_model_cls()
        self.assertEqual(found.architecture, "Qwen3MoeForCausalLM")
        self.assertTrue(found.is_text_generation_model)
        self.assertFalse(found.supports_pp or found.is_pooling_model or found.supports_multimodal)

    def test_without_library_vllm_keeps_its_models(self) -> None:
        ModelRegistry.register_model("Qwen3ForCausalLM", "vllm.model_executor.models.qwen3:Qwen3ForCausalLM")
        with (
            mock.patch.dict(os.environ, HADRON_PLUGIN_LIBRARY="/nowhere/libhadron_plugin.so"),
            self.assertLogs("vllm.hadron.vllm.register", logging.ERROR) as logs,
        ):
            register.register()
        self.assertIn("/nowhere/libhadron_plugin.so", logs.output[0])
        self.assertEqual(self.registered(), "vllm.model_executor.models.qwen3")

    def test_untested_version_is_reported(self) -> None:
        with (
            mock.patch.object(register, "TESTED_VERSIONS", ("0.1.0",)),
            self.assertLogs("vllm.hadron.vllm.register", logging.WARNING) as logs,
        ):
            register.register()
            register.register()
        self.assertEqual(len(logs.output), 1)
        self.assertIn("tested with vLLM 0.1.0", logs.output[0])

    def test_required_plugin_ends_the_process(self) -> None:
        for reason, variables in (
            ("HADRON_DISABLE_VLLM_PLUGIN=1", {"HADRON_DISABLE_VLLM_PLUGIN": "1"}),
            ("/nowhere/lib.so", {"HADRON_PLUGIN_LIBRARY": "/nowhere/lib.so"}),
        ):
            with (
                mock.patch.dict(os.environ, variables, HADRON_REQUIRE="1"),
                contextlib.redirect_stderr(io.StringIO()) as text,
                self.assertRaises(SystemExit),
            ):
                register.register()
            self.assertIn("HADRON_REQUIRE=1", text.getvalue())
            self.assertIn(reason, text.getvalue())

    def test_other_architectures_fail_if_hadron_is_required(self) -> None:
        with mock.patch.dict(os.environ, HADRON_REQUIRE="1"):
            register.register()
        self.assertEqual(self.registered(), "hadron.vllm.model")
        with self.assertRaisesRegex(LookupError, "HADRON_REQUIRE=1: Hadron has no model for GPT2LMHeadModel"):
            ModelRegistry.models["GPT2LMHeadModel"].load_model_cls()


class RefusalTest(FolderTest):
    """Settings that fail the start."""

    # For each refused feature, attributes of the configuration that request it.
    REQUESTS = (
        ("LoRA", {"lora_config": object()}),
        ("pipeline parallelism", {"parallel_config.pipeline_parallel_size": 2}),
        ("models on several hosts", {"parallel_config.nnodes": 2}),
        ("expert parallelism", {"parallel_config.enable_expert_parallel": True}),
        ("context parallelism", {"parallel_config.decode_context_parallel_size": 2}),
        ("dual batch overlap", {"parallel_config.enable_dbo": True}),
        ("speculative decoding", {"speculative_config": object()}),
        ("multimodal models", {"model_config.multimodal_config": object()}),
        ("prompt embeddings", {"model_config.enable_prompt_embeds": True}),
        ("pooling models", {"model_config.runner_type": "pooling"}),
        ("--hf-overrides", {"model_config.hf_overrides": {"rope_theta": 1}}),
        ("sleep mode", {"model_config.enable_sleep_mode": True}),
        ("weight offloading", {"offload_config.uva.cpu_offload_gb": 1}),
        ("KV connectors", {"kv_transfer_config": object()}),
        ("computed KV scales", {"cache_config.calculate_kv_scales": True}),
        ("routed experts", {"model_config.enable_return_routed_experts": True}),
        ("--quantization bitsandbytes", {"model_config.quantization": "bitsandbytes"}),
        ("--load-format gguf", {"load_config.load_format": "gguf"}),
        ("--kv-cache-dtype fp8_e5m2", {"cache_config.cache_dtype": "fp8_e5m2"}),
        ("--kv-cache-dtype float16", {"cache_config.cache_dtype": "float16"}),
        ("--block-size 24", {"cache_config.block_size": 24}),
        (
            "sliding windows of 8 tokens",
            {"model_config.hf_config.sliding_window": 8, "model_config.hf_config.use_sliding_window": True},
        ),
    )

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.config = EngineArgs(model=str(DEMO), dtype="bfloat16", **LIMITS).create_engine_config()
        cls.adapter = ADAPTERS["Qwen3ForCausalLM"]

    def changed(self, attributes: dict[str, object]) -> object:
        """Returns a copy of the configuration with other values."""
        config = copy.deepcopy(self.config)
        for path, value in attributes.items():
            parent, name = config, path
            while "." in name:
                first, _, name = name.partition(".")
                parent = getattr(parent, first)
            object.__setattr__(parent, name, value)
        return config

    def test_supported_settings_are_accepted(self) -> None:
        ranks = {"parallel_config.tensor_parallel_size": 2}
        for attributes in ({}, ranks, {"cache_config.cache_dtype": "fp8"}, {"cache_config.cache_dtype": "bfloat16"}):
            self.assertEqual(list(refusals.refusals(self.changed(attributes), self.adapter)), [])

    def test_each_unsupported_setting_is_refused_with_reason_and_remedy(self) -> None:
        for feature, attributes in self.REQUESTS:
            found = list(refusals.refusals(self.changed(attributes), self.adapter))
            self.assertEqual([str(refusal).startswith(feature) for refusal in found], [True], feature)
            self.assertTrue(all(len(part) > 10 for part in (found[0].reason, found[0].remedy)), feature)
        requested = {feature for feature, _ in self.REQUESTS}
        for rule in refusals.RULES:
            by_environment = "VLLM_" in rule.refusal.remedy
            covered = any(rule.refusal.feature.startswith(feature) for feature in requested)
            self.assertTrue(by_environment or covered, rule.refusal.feature)

    def test_settings_of_the_environment_are_refused(self) -> None:
        for name in ("VLLM_USE_BREAKABLE_CUDAGRAPH", "VLLM_BATCH_INVARIANT"):
            with mock.patch.dict(os.environ, {name: "1"}):
                found = list(refusals.refusals(self.config, self.adapter))
            self.assertEqual([name in refusal.remedy for refusal in found], [True])

    def test_mla_refuses_fp8_caches(self) -> None:
        config = self.changed({"cache_config.cache_dtype": "fp8"})
        found = list(refusals.refusals(config, ADAPTERS["DeepseekV3ForCausalLM"]))
        self.assertEqual([refusal.feature for refusal in found], ["an FP8 KV cache"])

    def test_engine_start_fails_with_all_refusals(self) -> None:
        with (
            self.assertRaises(ValueError) as caught,
            engine(DEMO, enable_prompt_embeds=True, hf_overrides={"rope_theta": 5000.0}, cpu_offload_gb=1),
        ):
            pass
        text = str(caught.exception)
        for part in ("prompt embeddings", "--hf-overrides", "weight offloading", register.WAY_BACK):
            self.assertIn(part, text)


class GoldenTest(FolderTest):
    """Engines over fixtures: 64 tokens per step, so that prompts are computed in chunks and mixed with decode rows."""

    def test_greedy_tokens_and_prefix_hits(self) -> None:
        for name in FIXTURES:
            golden = read_golden(name, self.folder)
            with self.subTest(name), golden_engine(golden) as llm:
                self.assertEqual(greedy(llm, golden.prompts), golden.greedy)
                self.assertEqual(greedy(llm, golden.prompts[::-1]), golden.greedy[::-1])
                self.assertGreater(metric(llm, "prefix_cache_hits"), 100)

    def test_hidden_states_of_last_tokens_suffice(self) -> None:
        golden = read_golden("qwen3-tied", self.folder)
        forward, steps = HadronForCausalLM.forward, []

        def forward_for_last(model: HadronForCausalLM, *args, **kwargs) -> torch.Tensor:
            hidden = forward(model, *args, **kwargs, last_tokens_only=True)
            steps.append(model._metadata())
            return hidden

        with (
            mock.patch.object(HadronForCausalLM, "forward", forward_for_last),
            golden_engine(golden) as llm,
        ):
            self.assertEqual(greedy(llm, golden.prompts), golden.greedy)
        prompts = [step for step in steps if step is not None and step.last_tokens() is not None]
        self.assertGreater(len(prompts), 1)

    def test_fp8_weights_with_block_scales(self) -> None:
        # vLLM accepts these weights with 16-bit activations only. Prompts have one chunk, because chunks change the
        # rounding of MLA.
        for name in ("qwen3-fp8-blocks", "qwen3_moe-fp8-blocks", "deepseek_v3-fp8-blocks"):
            golden = read_golden(name, self.folder)
            with self.subTest(name), golden_engine(golden, dtype="bfloat16") as llm:
                prompts = [prompt for prompt in golden.prompts if len(prompt) < LIMITS["max_num_batched_tokens"]]
                alone = [Sequence(open_model(golden, "bfloat16"), prompt) for prompt in prompts]
                expected = [[sequence.step() for _ in range(STEPS)] for sequence in alone]
                self.assertEqual(greedy(llm, prompts), expected)

    def test_preemptions(self) -> None:
        golden = read_golden("qwen3-tied", self.folder)
        blocks = {"num_gpu_blocks_override": 25, "enable_prefix_caching": False}
        with golden_engine(golden, **blocks) as llm:
            prompts, expected = golden.prompts[2:4] * 5, golden.greedy[2:4] * 5
            self.assertEqual(greedy(llm, prompts), expected)
            self.assertGreaterEqual(metric(llm, "num_preemptions"), 5)

    def test_two_engines_in_one_process(self) -> None:
        first, second = (read_golden(name, self.folder) for name in ("llama-untied", "deepseek_v2-greedy"))
        with golden_engine(first) as one, golden_engine(second) as other:
            for _ in range(2):
                self.assertEqual(greedy(one, first.prompts), first.greedy)
                self.assertEqual(greedy(other, second.prompts), second.greedy)


class RequestStateTest(unittest.TestCase):
    """Requests of the second model runner, which needs a GPU itself."""

    def test_prompt_logprobs_need_hidden_states_of_all_tokens(self) -> None:
        base = HadronModelState.__mro__[1]
        replaced = {"__init__": lambda *_: None, "add_request": mock.Mock(), "prepare_inputs": lambda *_: {"a": 1}}
        with mock.patch.multiple(base, **replaced):
            state = HadronModelState()
            for name, prompt_logprobs in (("plain", None), ("scored", 0)):
                params = SamplingParams(prompt_logprobs=prompt_logprobs)
                state.add_request(0, SimpleNamespace(req_id=name, sampling_params=params))

            def inputs(*names: str) -> dict:
                return state.prepare_inputs(SimpleNamespace(req_ids=list(names)), None)

            self.assertEqual(inputs("plain"), {"a": 1, "last_tokens_only": True})
            self.assertEqual(inputs("plain", "scored"), {"a": 1, "last_tokens_only": False})
            state.remove_request("scored")
            self.assertEqual(inputs("plain", "scored"), {"a": 1, "last_tokens_only": True})


class DemoTest(FolderTest):
    """One engine over the demo model in bf16."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        settings = {"dtype": "bfloat16", "max_model_len": 1024, "max_logprobs": 5}
        cls.llm = cls.enterClassContext(engine(DEMO, **settings))

    def answers(self, asked: list[dict], **settings) -> list[list[str]]:
        """Returns the texts that answer questions, one list per question."""
        parameters = SamplingParams(**({"temperature": 0, "max_tokens": 40} | settings))
        outputs = self.llm.chat([item["messages"] for item in asked], parameters, use_tqdm=False)
        return [[choice.text for choice in output.outputs] for output in outputs]

    def test_ten_concurrent_requests(self) -> None:
        asked = questions(10)
        self.assertEqual(self.answers(asked), [[item["answer"]] for item in asked])

    def test_several_choices(self) -> None:
        asked = questions(2)
        for texts in self.answers(asked, n=3, temperature=0.7, seed=1):
            self.assertEqual(len(texts), 3)
        self.assertEqual(self.answers(asked, n=3, temperature=0.01, seed=1), [[item["answer"]] * 3 for item in asked])

    def test_logprobs(self) -> None:
        parameters = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=2)
        (output,) = self.llm.generate(["What is 17 plus 25?"], parameters, use_tqdm=False)
        choice = output.outputs[0]
        for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            self.assertEqual(entry[token].rank, 1)
            self.assertLessEqual(max(found.logprob for found in entry.values()), 0)
        self.assertEqual(len(output.prompt_logprobs), len(output.prompt_token_ids))
        self.assertTrue(all(len(entry) >= 2 for entry in output.prompt_logprobs[1:]))

    def test_structured_output(self) -> None:
        asked = questions(3)
        pattern = StructuredOutputsParams(regex=r"[a-c]{3}-[0-9]{2}")
        for (text,) in self.answers(asked, structured_outputs=pattern):
            self.assertRegex(text, r"^[a-c]{3}-[0-9]{2}$")

    def test_aborted_request_does_not_change_others(self) -> None:
        core, asked = self.llm.llm_engine, questions(4)
        texts = {}
        for i, item in enumerate(asked):
            prompt = self.llm.get_tokenizer().apply_chat_template(
                item["messages"], tokenize=False, add_generation_prompt=True
            )
            core.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=40))
        for step in range(200):
            if step == 3:
                core.abort_request(["1"])
            texts |= {output.request_id: output.outputs[0].text for output in core.step() if output.finished}
            if not core.has_unfinished_requests():
                break
        expected = {str(i): item["answer"] for i, item in enumerate(asked) if i != 1}
        self.assertEqual({name: texts.get(name) for name in expected}, expected)

    def test_weights_cannot_be_replaced(self) -> None:
        def model():
            return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

        with self.assertRaisesRegex(NotImplementedError, "HADRON_DISABLE_VLLM_PLUGIN=1"):
            model().load_weights([])


class Fp8KvCacheTest(FolderTest):
    """The demo model with keys and values in FP8, in blocks of 32 tokens."""

    def test_answers(self) -> None:
        with engine(DEMO, dtype="bfloat16", max_model_len=1024, kv_cache_dtype="fp8", block_size=32) as llm:
            asked = questions(20)
            parameters = SamplingParams(temperature=0, max_tokens=40)
            outputs = llm.chat([item["messages"] for item in asked], parameters, use_tqdm=False)
            right = sum(out.outputs[0].text == item["answer"] for out, item in zip(outputs, asked, strict=True))
            self.assertGreaterEqual(right, 19)


if __name__ == "__main__":
    print(f"Hadron {abi.library_version()}", flush=True)
    unittest.main(verbosity=2)
