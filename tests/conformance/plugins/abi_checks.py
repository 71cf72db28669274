#!/usr/bin/env python3
"""The library through its ctypes binding, on a CPU and without a host: golden tokens, and wrong arguments."""

import dataclasses
import tempfile
import unittest
from pathlib import Path

import torch

from golden import DEMO, STEPS, Golden, read_golden
from hadron import abi

BLOCK_TOKENS, BLOCKS, TABLE_WIDTH = 16, 64, 16
LIMITS = {"max_model_len": 256, "max_num_tokens": 160, "max_num_rows": 4}


def open_model(golden: Golden, dtype: str = "float32", ranks: abi.Ranks | None = None) -> abi.Model:
    """Opens a model and rehearses it."""
    options = {"model_dir": str(golden.folder), "device": "cpu", "dtype": dtype, "threads": 1}
    model = abi.Model(options | LIMITS | {"load_format": "synth", "seed": golden.seed}, ranks)
    model.rehearse()
    return model


class Sequence:
    """One request of a model with a KV cache of its own, whose blocks are scattered."""

    def __init__(self, model: abi.Model, prompt: list[int]) -> None:
        self.model, self.facts, self.tokens, self.computed = model, model.describe(), list(prompt), 0
        self.dtype = getattr(torch, self.facts.kv_layers[0].dtype)
        self.table = torch.tensor([[(7 * i + 1) % BLOCKS for i in range(TABLE_WIDTH)]], dtype=torch.int32)
        sizes = [BLOCK_TOKENS * layer.token_elements() for layer in self.facts.kv_layers]
        self.kv = [torch.zeros(BLOCKS, size, dtype=self.dtype) for size in sizes]

    def inputs(self) -> abi.StepInputs:
        """Inputs of the step that computes all new tokens."""
        new = self.tokens[self.computed :]
        positions = torch.arange(self.computed, len(self.tokens))
        blocks = self.table[0, positions // BLOCK_TOKENS].long()
        return abi.StepInputs(
            token_ids=torch.tensor(new, dtype=torch.int32),
            positions=positions,
            slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            row_starts=torch.tensor([0, len(new)], dtype=torch.int32),
            context_lens=torch.tensor([len(self.tokens)], dtype=torch.int32),
            block_tables=self.table,
            output_tokens=torch.tensor([len(new) - 1], dtype=torch.int32),
            hidden=torch.empty(1, self.facts.hidden_size, dtype=self.dtype),
            tokens=len(new),
            rows=1,
            decode_rows=int(len(new) == 1),
            max_query_len=len(new),
            max_context_len=len(self.tokens),
            one_token_rows=len(new) == 1,
            stream=0,
        )

    def step(self) -> int:
        """Computes the next greedy token."""
        self.model.bind_kv(self.kv, BLOCKS, BLOCK_TOKENS)
        step = self.inputs()
        self.model.forward(step)
        logits = torch.empty(1, self.facts.vocab_size)
        self.model.logits(0, step.hidden, logits)
        self.computed = len(self.tokens)
        self.tokens.append(int(logits.argmax()))
        return self.tokens[-1]


class AbiTest(unittest.TestCase):
    """Calls of the library."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.qwen3 = read_golden("qwen3-tied", Path(cls.folder.name))
        cls.deepseek = read_golden("deepseek_v3-groups-yarn", Path(cls.folder.name))
        cls.fp8 = read_golden("deepseek_v3-fp8-blocks", Path(cls.folder.name))

    def test_models_in_turn_compute_golden_tokens(self) -> None:
        for prompt in range(len(self.qwen3.prompts)):
            goldens = (self.qwen3, self.deepseek, self.fp8)
            models = [Sequence(open_model(golden), golden.prompts[prompt]) for golden in goldens]
            tokens = [[sequence.step() for sequence in models] for _ in range(STEPS)]
            self.assertEqual([list(row) for row in zip(*tokens, strict=True)], [g.greedy[prompt] for g in goldens])
            self.assertEqual([sequence.model.count().steps for sequence in models], [STEPS] * 3)

    def test_wrong_arrays_are_rejected_by_name(self) -> None:
        sequence = Sequence(open_model(self.qwen3), self.qwen3.prompts[2])
        sequence.model.bind_kv(sequence.kv, BLOCKS, BLOCK_TOKENS)
        good = sequence.inputs()
        for name in ("token_ids", "positions", "slots", "row_starts", "context_lens", "block_tables", "hidden"):
            for kind, wrong in wrong_tensors(getattr(good, name)).items():
                step = dataclasses.replace(good, **{name: wrong})
                with self.subTest(name, kind=kind), self.assertRaisesRegex(abi.RejectedError, name):
                    sequence.model.forward(step)
        self.assertEqual(sequence.step(), self.qwen3.greedy[2][0])

    def test_numbers_above_limits_are_rejected(self) -> None:
        sequence = Sequence(open_model(self.qwen3), self.qwen3.prompts[2])
        with self.assertRaisesRegex(abi.RejectedError, "hadron_bind_kv"):
            sequence.model.forward(sequence.inputs())
        sequence.model.bind_kv(sequence.kv, BLOCKS, BLOCK_TOKENS)
        good = sequence.inputs()
        for name, value in (
            ("tokens", 161),
            ("rows", 5),
            ("max_context_len", 257),
            ("max_query_len", good.tokens + 1),
            ("decode_rows", 2),
        ):
            with self.subTest(name), self.assertRaisesRegex(abi.RejectedError, f"{name} is {value}"):
                sequence.model.forward(dataclasses.replace(good, **{name: value}))
        narrow = dataclasses.replace(good, block_tables=good.block_tables[:, :1].clone())
        with self.assertRaisesRegex(abi.RejectedError, "max_context_len is 17, at most 16 is allowed"):
            sequence.model.forward(narrow)
        with self.assertRaisesRegex(abi.RejectedError, "rows of one token"):
            sequence.model.forward(dataclasses.replace(good, one_token_rows=True))
        self.assertEqual(sequence.step(), self.qwen3.greedy[2][0])

    def test_wrong_logits_and_kv_caches_are_rejected(self) -> None:
        sequence = Sequence(open_model(self.qwen3), self.qwen3.prompts[2])
        model, vocab_size = sequence.model, sequence.facts.vocab_size
        hidden, logits = torch.zeros(2, sequence.facts.hidden_size), torch.zeros(2, vocab_size)
        model.logits(0, hidden, logits)
        for kind, wrong in wrong_tensors(logits).items():
            with self.subTest("logits", kind=kind), self.assertRaisesRegex(abi.RejectedError, "logits"):
                model.logits(0, hidden, wrong)
        for kind in ("dtype", "unknown dtype", "misaligned", "strided"):
            with self.subTest("hidden", kind=kind), self.assertRaisesRegex(abi.RejectedError, "hidden"):
                model.logits(0, wrong_tensors(hidden)[kind], logits)
        with self.assertRaisesRegex(abi.RejectedError, "rows is 161"):
            model.logits(0, torch.zeros(161, sequence.facts.hidden_size), logits)
        for kind, layers in (
            ("count", sequence.kv[:-1]),
            ("size", [*sequence.kv[:-1], sequence.kv[-1][1:].clone()]),
            ("null", [*sequence.kv[:-1], torch.empty(0)]),
            ("alignment", [*sequence.kv[:-1], torch.zeros(sequence.kv[-1].numel() + 1)[1:]]),
        ):
            with self.subTest("kv", kind=kind), self.assertRaisesRegex(abi.RejectedError, "KV cache"):
                model.bind_kv(layers, BLOCKS, BLOCK_TOKENS)
        self.assertEqual(sequence.step(), self.qwen3.greedy[2][0])

    def test_wrong_options_are_rejected_by_name(self) -> None:
        good = {"model_dir": str(DEMO), "device": "cpu", "dtype": "float32"} | LIMITS
        for name, value in (
            ("model_dir", "/nowhere"),
            ("device", "tpu"),
            ("dtype", "int8"),
            ("kv_cache_dtype", "int8"),
            ("load_format", "gguf"),
            ("max_num_tokens", 0),
            ("capture_rows", [5]),
            ("unknown_option", 1),
        ):
            text = value if name == "model_dir" else name if name in ("max_num_tokens", "capture_rows") else "options"
            with self.subTest(name), self.assertRaisesRegex(abi.RejectedError, text):
                abi.Model(good | {name: value})

    def test_library_errors(self) -> None:
        with self.assertRaisesRegex(abi.LibraryError, "nowhere"):
            abi.load_library(Path("/nowhere/libhadron_plugin.so"))
        model = open_model(self.qwen3)
        model.close()
        model.close()
        with self.assertRaisesRegex(abi.RejectedError, "closed"):
            model.rehearse()


def wrong_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns variants of an argument, each with one fault."""
    memory = bytearray(tensor.nbytes + 1)
    variants = {
        "null": torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype),
        "too small": tensor[:-1].clone(),
        "dtype": tensor.to(torch.float16),
        "unknown dtype": tensor.to(torch.int16),
        "misaligned": torch.frombuffer(memory, dtype=tensor.dtype, offset=1).view(tensor.shape),
    }
    if tensor.numel() > 1:
        variants["strided"] = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
    return variants


if __name__ == "__main__":
    unittest.main()
