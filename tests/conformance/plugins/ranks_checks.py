#!/usr/bin/env python3
"""Tensor parallelism through the ctypes binding, on a CPU and without a host: processes of a gloo group of torch."""

import multiprocessing
import os
import signal
import tempfile
import time
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from torch import distributed

from abi_checks import Sequence, open_model
from golden import STEPS, Golden, read_golden
from hadron import abi
from hadron.ranks import GroupRanks

SIZE = 2
FIXTURES = ("qwen3-tied", "qwen3_moe-plain-tied", "deepseek_v3-groups-yarn")
START_SECONDS, END_SECONDS = 60, 10


def compute_tokens(ranks: GroupRanks, goldens: list[Golden], parent: Connection) -> None:
    """Sends the greedy continuation of one prompt of each fixture, and what the first model says about itself."""
    models = [open_model(golden, ranks=ranks) for golden in goldens]
    sequences = [Sequence(model, golden.prompts[3]) for model, golden in zip(models, goldens, strict=True)]
    tokens = [[sequence.step() for sequence in sequences] for _ in range(STEPS)]
    parent.send(([list(row) for row in zip(*tokens, strict=True)], models[0].describe()))
    distributed.barrier()  # A rank that closes its model is a failed rank for the others.


def compute_until_failure(ranks: GroupRanks, goldens: list[Golden], parent: Connection) -> None:
    """Sends a message per step, and the error that ends the steps."""
    model = open_model(goldens[0], ranks=ranks)
    while True:
        sequence = Sequence(model, goldens[0].prompts[2])
        try:
            for _ in range(STEPS):
                sequence.step()
                parent.send("step")
        except abi.FailedError as error:
            parent.send(str(error))
            return


def run_rank(rank: int, store: Path, compute: Callable, goldens: list[Golden], parent: Connection) -> None:
    """Runs one rank in a process of its own."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    compute(GroupRanks(distributed.group.WORLD), goldens, parent)


class FakeRanks:
    """Ranks whose communication fails."""

    rank, size = 0, SIZE

    def __init__(self, result: list[bytes] | BaseException) -> None:
        self.result = result

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns or raises the result."""
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class RanksTest(unittest.TestCase):
    """Models that two processes compute together."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.goldens = [read_golden(name, self.folder) for name in FIXTURES]

    def start(self, compute: Callable) -> list[tuple[multiprocessing.Process, Connection]]:
        """Starts the ranks."""
        context, started = multiprocessing.get_context("spawn"), []
        for rank in range(SIZE):
            parent, child = context.Pipe()
            arguments = (rank, self.folder / "store", compute, self.goldens, child)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            child.close()
            self.addCleanup(process.kill)
            started.append((process, parent))
        return started

    def receive(self, connection: Connection, seconds: float = START_SECONDS) -> object:
        """Returns the next message of a rank."""
        self.assertTrue(connection.poll(seconds), f"no message within {seconds} s")
        return connection.recv()

    def test_ranks_compute_golden_tokens(self) -> None:
        expected = [golden.greedy[3] for golden in self.goldens]
        for process, connection in self.start(compute_tokens):
            tokens, facts = self.receive(connection)
            self.assertEqual(tokens, expected)
            self.assertEqual((facts.heads, facts.kv_layers[0].heads), (2, 1))
            process.join(END_SECONDS)
            self.assertEqual(process.exitcode, 0)

    def test_other_ranks_fail_if_one_is_killed(self) -> None:
        (survivor, messages), (victim, steps) = self.start(compute_until_failure)
        self.receive(steps)
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        while (message := self.receive(messages, END_SECONDS)) == "step":
            self.assertLess(time.monotonic() - killed, END_SECONDS)
        self.assertIn("rank 1", message)
        survivor.join(END_SECONDS)
        self.assertEqual(survivor.exitcode, 0)
        self.assertLess(time.monotonic() - killed, END_SECONDS)

    def test_errors_of_the_communication_are_raised(self) -> None:
        with self.assertRaisesRegex(abi.FailedError, "all-gather .* OSError: the group is closed") as caught:
            open_model(self.goldens[0], ranks=FakeRanks(OSError("the group is closed")))
        self.assertIsInstance(caught.exception.__cause__, OSError)
        for wrong in ([], [b"a"] * SIZE):
            with self.assertRaisesRegex(abi.FailedError, "all_gather returned .* not [0-9]+ of each of 2 ranks"):
                open_model(self.goldens[0], ranks=FakeRanks(wrong))
        with self.assertRaises(SystemExit):
            open_model(self.goldens[0], ranks=FakeRanks(SystemExit()))


if __name__ == "__main__":
    unittest.main(verbosity=2)
