#!/usr/bin/env python3
"""SGLang with Hadron's models on a CPU: registration, refusals, and what engines generate."""

import contextlib
import copy
import io
import logging
import os
import tempfile
import unittest
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

from sglang import Engine
from sglang.srt.plugins import load_plugins, load_plugins_by_group
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs
from transformers import AutoConfig

from golden import DEMO, STEPS, Golden, questions, read_golden
from hadron.adapters import ADAPTERS
from hadron.sglang import register

GROUP = "sglang.srt.plugins"
LIMITS = {
    "device": "cpu",
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.1,
}
FIXTURES = ("qwen3-tied", "qwen3_moe-plain-tied", "deepseek_v3-groups-yarn")


@contextlib.contextmanager
def engine(model: Path, **settings) -> Iterator[Engine]:
    """An engine whose processes end at the end."""
    running = Engine(model_path=str(model), **(LIMITS | settings))
    try:
        yield running
    finally:
        running.shutdown()


def golden_engine(golden: Golden, **settings) -> contextlib.AbstractContextManager[Engine]:
    """An engine with the synthetic weights of a fixture in f32."""
    synthetic = {"load_format": "dummy", "random_seed": golden.seed, "skip_tokenizer_init": True, "dtype": "float32"}
    return engine(golden.folder, **(synthetic | settings))


def greedy(running: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Returns the greedy continuations of prompts, all of which run together, and the number of cached tokens."""
    parameters = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    outputs = running.generate(input_ids=prompts, sampling_params=parameters)
    cached = sum(output["meta_info"]["cached_tokens"] for output in outputs)
    return [list(output["output_ids"]) for output in outputs], cached


class RegistrationTest(unittest.TestCase):
    """The entry point. The names of the tests give their order, because registration cannot be undone."""

    def test_1_plugin_is_discovered(self) -> None:
        found = {point.name: point.value for point in entry_points(group=GROUP)}
        self.assertEqual(found["hadron"], "hadron.sglang.register:register")
        for allowed, loaded in (("", True), ("hadron,other", True), ("other", False)):
            with mock.patch.dict(os.environ, SGLANG_PLUGINS=allowed):
                self.assertEqual("hadron" in load_plugins_by_group(GROUP), loaded, allowed)

    def test_2_disabled_plugin_changes_nothing(self) -> None:
        with mock.patch.dict(os.environ, HADRON_DISABLE_SGLANG_PLUGIN="1"):
            register.register()
        self.assertNotIn("hadron", ATTENTION_BACKEND_CHOICES)

    def test_3_without_library_sglang_keeps_its_models(self) -> None:
        with (
            mock.patch.dict(os.environ, HADRON_PLUGIN_LIBRARY="/nowhere/libhadron_plugin.so"),
            self.assertLogs("hadron.sglang.register", logging.ERROR) as logs,
        ):
            register.register()
        self.assertIn("/nowhere/libhadron_plugin.so", logs.output[0])
        self.assertNotIn("hadron", ATTENTION_BACKEND_CHOICES)

    def test_4_other_model_packages_are_reported(self) -> None:
        with (
            mock.patch.dict(os.environ, SGLANG_EXTERNAL_MODEL_PACKAGE="other.models", HADRON_REQUIRE="1"),
            contextlib.redirect_stderr(io.StringIO()) as text,
            self.assertRaises(SystemExit),
        ):
            register.register()
        self.assertIn("SGLANG_EXTERNAL_MODEL_PACKAGE=other.models", text.getvalue())

    def test_5_required_plugin_ends_the_process(self) -> None:
        for reason, variables in (
            ("HADRON_DISABLE_SGLANG_PLUGIN=1", {"HADRON_DISABLE_SGLANG_PLUGIN": "1"}),
            ("/nowhere/lib.so", {"HADRON_PLUGIN_LIBRARY": "/nowhere/lib.so"}),
        ):
            with (
                mock.patch.dict(os.environ, variables, HADRON_REQUIRE="1"),
                contextlib.redirect_stderr(io.StringIO()) as text,
                self.assertRaises(SystemExit),
            ):
                register.register()
            self.assertIn(reason, text.getvalue())

    def test_6_plugin_registers_once(self) -> None:
        with (
            mock.patch.object(register, "TESTED_VERSIONS", ("0.1.0",)),
            mock.patch.dict(os.environ, HADRON_REQUIRE="1"),
            self.assertLogs("hadron.sglang.register", logging.WARNING) as logs,
        ):
            load_plugins()
            register.register()
            self.assertEqual(os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"], "hadron.sglang.models")
        self.assertEqual(len(logs.output), 1)
        self.assertIn("tested with SGLang 0.1.0", logs.output[0])
        self.assertEqual(ATTENTION_BACKEND_CHOICES.count("hadron"), 1)

    def test_7_other_architectures_fail_if_hadron_is_required(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
            with contextlib.redirect_stderr(io.StringIO()) as text, self.assertRaises(SystemExit):
                ServerArgs(model_path=folder, load_format="dummy", **LIMITS)
        self.assertIn("Hadron has no model for GPT2LMHeadModel", text.getvalue())


class RefusalTest(unittest.TestCase):
    """Arguments that fail the start."""

    # For each refused feature, arguments that request it.
    REQUESTS = (
        ("LoRA", {"enable_lora": True}),
        ("pipeline parallelism", {"pp_size": 2}),
        ("models on several hosts", {"nnodes": 2}),
        ("expert parallelism", {"ep_size": 2}),
        ("context parallelism", {"dcp_size": 2}),
        ("overlapping forward passes", {"enable_two_batch_overlap": True}),
        ("speculative decoding", {"speculative_algorithm": "NGRAM"}),
        ("prefill-decode disaggregation", {"disaggregation_mode": "prefill"}),
        ("other layouts", {"enable_page_major_kv_layout": True}),
        ("weight offloading", {"cpu_offload_gb": 1}),
        ("torch.compile", {"enable_torch_compile": True}),
        ("embeddings", {"is_embedding": True}),
        ("--json-model-override-args", {"json_model_override_args": '{"rope_theta": 1}'}),
        ("routed experts", {"enable_return_routed_experts": True}),
        ("deterministic inference", {"enable_deterministic_inference": True}),
        ("an attention backend", {"prefill_attention_backend": "triton"}),
        ("an attention backend", {"device": "cuda", "attention_backend": "fa3"}),
        ("--quantization fp8", {"quantization": "fp8"}),
        ("--load-format gguf", {"load_format": "gguf"}),
        ("--kv-cache-dtype fp8_e5m2", {"kv_cache_dtype": "fp8_e5m2"}),
        ("--page-size 8", {"page_size": 8}),
    )

    @classmethod
    def setUpClass(cls) -> None:
        load_plugins()
        cls.arguments = ServerArgs(model_path=str(DEMO), dtype="bfloat16", **LIMITS)
        cls.config = AutoConfig.from_pretrained(DEMO)

    def refused(self, **values) -> list:
        """Returns the refusals for arguments with other values."""
        from hadron.sglang.refusals import refusals

        arguments = copy.copy(self.arguments)
        for name, value in values.items():
            object.__setattr__(arguments, name, value)
        return list(refusals(arguments, self.config, ADAPTERS["Qwen3ForCausalLM"]))

    def test_supported_settings_are_accepted(self) -> None:
        self.assertEqual(self.arguments.attention_backend, "hadron")
        self.assertEqual(self.arguments.page_size, 16)
        self.assertEqual(self.refused(), [])
        self.assertEqual(self.refused(kv_cache_dtype="fp8_e4m3", page_size=64), [])
        self.assertEqual(self.refused(tp_size=2), [])

    def test_each_unsupported_setting_is_refused_with_reason_and_remedy(self) -> None:
        from hadron.sglang.refusals import RULES

        for feature, values in self.REQUESTS:
            found = self.refused(**values)
            self.assertEqual([str(refusal).startswith(feature) for refusal in found], [True], feature)
            self.assertTrue(all(len(part) > 10 for part in (found[0].reason, found[0].remedy)), feature)
        requested = {feature for feature, _ in self.REQUESTS}
        for rule in RULES[:-2]:
            covered = any(rule.refusal.feature.startswith(feature) for feature in requested)
            self.assertTrue(covered, rule.refusal.feature)

    def test_settings_of_graphs_and_of_the_environment_are_refused(self) -> None:
        graphs = copy.deepcopy(self.arguments.cuda_graph_config)
        graphs.decode.backend = "breakable"
        self.assertEqual(
            [refusal.feature for refusal in self.refused(cuda_graph_config=graphs)], ["breakable CUDA graphs"]
        )
        with mock.patch.dict(os.environ, SGLANG_ENABLE_POST_CAPTURE_KV_SIZING="1"):
            self.assertEqual(len(self.refused()), 1)

    def test_start_fails_with_all_refusals(self) -> None:
        with self.assertRaises(ValueError) as caught:
            ServerArgs(model_path=str(DEMO), **LIMITS, torchao_config="int8wo", json_model_override_args='{"a": 1}')
        text = str(caught.exception)
        for part in ("torchao", "--json-model-override-args", register.WAY_BACK):
            self.assertIn(part, text)


class GoldenTest(unittest.TestCase):
    """Engines over fixtures, with chunks of 64 tokens."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_greedy_tokens_and_prefix_hits(self) -> None:
        for name in FIXTURES:
            golden = read_golden(name, self.folder)
            with self.subTest(name), golden_engine(golden, enable_mixed_chunk=name == "qwen3-tied") as running:
                self.assertEqual(greedy(running, golden.prompts)[0], golden.greedy)
                tokens, cached = greedy(running, golden.prompts[::-1])
                self.assertEqual(tokens, golden.greedy[::-1])
                self.assertGreater(cached, 100)

    def test_retracted_requests(self) -> None:
        golden = read_golden("llama-untied", self.folder)
        pressure = {"max_total_tokens": 400, "schedule_conservativeness": 0.01, "disable_radix_cache": True}
        with golden_engine(golden, **pressure) as running:
            prompts, expected = golden.prompts[2:4] * 5, golden.greedy[2:4] * 5
            self.assertEqual(greedy(running, prompts)[0], expected)


class DemoTest(unittest.TestCase):
    """One engine over the demo model in bf16, with keys and values in FP8."""

    @classmethod
    def setUpClass(cls) -> None:
        # xgrammar's masks need a GPU.
        settings = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "grammar_backend": "llguidance"}
        cls.running = cls.enterClassContext(engine(DEMO, **settings))
        cls.tokenizer = cls.running.tokenizer_manager.tokenizer

    def prompts(self, asked: list[dict]) -> list[str]:
        """Returns the prompts of questions."""
        template = {"tokenize": False, "add_generation_prompt": True}
        return [self.tokenizer.apply_chat_template(item["messages"], **template) for item in asked]

    def test_ten_concurrent_requests(self) -> None:
        asked = questions(10)
        outputs = self.running.generate(self.prompts(asked), {"temperature": 0, "max_new_tokens": 40})
        self.assertEqual([output["text"] for output in outputs], [item["answer"] for item in asked])

    def test_several_choices(self) -> None:
        asked = questions(2)
        outputs = self.running.generate(self.prompts(asked), {"temperature": 0.01, "max_new_tokens": 40, "n": 3})
        self.assertEqual([output["text"] for output in outputs], [item["answer"] for item in asked for _ in range(3)])

    def test_logprobs(self) -> None:
        output = self.running.generate(
            "What is 17 plus 25?",
            {"temperature": 0, "max_new_tokens": 8},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=5,
        )
        facts = output["meta_info"]
        for (value, token, _), top in zip(facts["output_token_logprobs"], facts["output_top_logprobs"], strict=True):
            self.assertEqual(top[0][1], token)
            self.assertAlmostEqual(top[0][0], value, places=4)
            self.assertLessEqual(value, 0)
        self.assertEqual(len(facts["input_token_logprobs"]), facts["prompt_tokens"])

    def test_structured_output(self) -> None:
        prompts = self.prompts(questions(3))
        parameters = {"temperature": 0, "max_new_tokens": 12, "regex": r"[a-c]{3}-[0-9]{2}"}
        for output in self.running.generate(prompts, parameters):
            self.assertRegex(output["text"], r"^[a-c]{3}-[0-9]{2}$")

    def test_weights_cannot_be_replaced(self) -> None:
        done, message, *_ = self.running.update_weights_from_disk(str(DEMO))
        self.assertFalse(done)
        self.assertIn("HADRON_DISABLE_SGLANG_PLUGIN=1", message)
        self.test_ten_concurrent_requests()


if __name__ == "__main__":
    classes = ("RegistrationTest", "RefusalTest", "GoldenTest", "DemoTest")
    unittest.main(verbosity=2, defaultTest=classes)
