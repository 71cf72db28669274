#!/usr/bin/env python3
"""A host's server with two tensor-parallel ranks, on a CPU: golden tokens, and the end of all processes if one dies.

    server_ranks_checks.py HOST

HOST is vllm or sglang.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from unittest import mock

from golden import STEPS, Golden, read_golden
from http_checks import POSITIVE_LINE, server

SIZE = 2
# Twice what an idle machine may take.
END_SECONDS = 20


class Host(ABC):
    """A host: the name of the process of the last rank, and environment variables for two ranks on a CPU."""

    worker: str
    variables: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def command(self, golden: Golden) -> list[str]:
        """Returns the command that serves a fixture with synthetic weights in f32."""

    @abstractmethod
    def complete(self, url: str, golden: Golden, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Returns the greedy continuations of prompts, all of which run together."""


class Vllm(Host):
    """vLLM."""

    worker = "VLLM::Worker_TP1"

    def command(self, golden: Golden) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(golden.folder)),
            *("--tensor-parallel-size", str(SIZE), "--load-format", "dummy", "--seed", str(golden.seed)),
            *("--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "16"),
            *("--max-num-batched-tokens", "64", "--block-size", "16", "--kv-cache-memory-bytes", str(64 << 20)),
            "--enforce-eager",
        ]

    def complete(self, url: str, golden: Golden, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        body = {"model": str(golden.folder), "prompt": prompts, "max_tokens": tokens, "temperature": 0}
        answer = post(f"{url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
        return [choice["token_ids"] for choice in answer["choices"]]


class Sglang(Host):
    """SGLang."""

    worker = "sglang::scheduler_TP1"
    variables = MappingProxyType(
        {
            # By default, each rank needs a NUMA node of its own.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * SIZE),
            # SGLang would call the stand-in of NCCL.
            "SGLANG_NCCL_SO_PATH": "/nowhere/libnccl.so",
        }
    )

    def command(self, golden: Golden) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(golden.folder), "--device", "cpu"),
            *("--tp-size", str(SIZE), "--load-format", "dummy", "--random-seed", str(golden.seed)),
            *("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "16"),
            *("--chunked-prefill-size", "64", "--max-total-tokens", "4096", "--mem-fraction-static", "0.1"),
            *("--disable-cuda-graph", "--skip-server-warmup"),
        ]

    def complete(self, url: str, golden: Golden, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = post(f"{url}/generate", {"input_ids": prompts, "sampling_params": parameters})
        return [answer["output_ids"] for answer in answers]


HOSTS = {"vllm": Vllm(), "sglang": Sglang()}


def post(url: str, body: dict) -> dict | list:
    """Returns the answer to a request in JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def processes(session: int) -> dict[str, int]:
    """Returns the processes of a session by command line, without those that have ended."""
    command = ["ps", "-eo", "pid=,sid=,stat=,args="]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split(maxsplit=3) for line in lines]
    return {text.strip(): int(pid) for pid, sid, state, text in fields if int(sid) == session and state[0] != "Z"}


class RanksTest(unittest.TestCase):
    """A server whose model is computed by two processes."""

    host: Host

    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.golden = read_golden("qwen3-tied", self.folder)

    def test_golden_tokens_and_end_after_a_rank_is_killed(self) -> None:
        self.enterContext(mock.patch.dict(os.environ, self.host.variables))
        log = self.folder / "server.log"
        try:
            with server(self.host.command(self.golden), log) as (url, process):
                tokens = self.host.complete(url, self.golden, self.golden.prompts, STEPS)
                self.assertEqual(tokens, self.golden.greedy)
                self.assertEqual(len(POSITIVE_LINE.findall(log.read_text())), SIZE)
                self.kill_rank(url, process)
        except Exception:
            print(log.read_text()[-8000:])
            raise

    def kill_rank(self, url: str, process: subprocess.Popen) -> None:
        """Kills the last rank while requests run."""
        failed = threading.Event()

        def generate() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                while True:
                    self.host.complete(url, self.golden, self.golden.prompts[2:3] * 16, 200)
            failed.set()

        threading.Thread(target=generate, daemon=True).start()
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(processes(process.pid)[self.host.worker], signal.SIGKILL)
        while left := processes(process.pid):
            self.assertLess(time.monotonic() - killed, END_SECONDS, left)
            time.sleep(0.1)
            process.poll()
        self.assertTrue(failed.wait(10))
        print(f"OK: all processes ended {time.monotonic() - killed:.1f} s after a rank was killed")


if __name__ == "__main__":
    RanksTest.host = HOSTS[sys.argv.pop()]
    unittest.main(verbosity=2)
