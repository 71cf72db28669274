#!/usr/bin/env python3
"""A host's HTTP server with Hadron's models answers all questions of the demo model: `http_checks.py HOST HADRON`.

HOST is vllm or sglang, HADRON a built `hadron` binary; `hadron eval tasks` sends the questions.
"""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from golden import DEMO

START_SECONDS = 300
QUESTIONS = 500
CONCURRENCY = 64
SERVERS = {
    "vllm": [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(DEMO)),
        *("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", str(CONCURRENCY), "--enforce-eager"),
        *("--max-num-batched-tokens", "512", "--block-size", "16", "--kv-cache-memory-bytes", str(256 << 20)),
        "--disable-uvicorn-access-log",
    ],
    "sglang": [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(DEMO), "--device", "cpu"),
        *("--dtype", "bfloat16", "--context-length", "1024", "--max-running-requests", str(CONCURRENCY)),
        *("--chunked-prefill-size", "512", "--max-total-tokens", "32768", "--mem-fraction-static", "0.1"),
        *("--disable-cuda-graph", "--skip-server-warmup"),
    ],
}
POSITIVE_LINE = re.compile(r"Qwen3ForCausalLM: Hadron \S+ computes the model on cpu")


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """Runs a server in a session of its own, and yields its URL and its process when it is ready."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HADRON_REQUIRE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen, url: str) -> None:
    """Returns when the server answers /health."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {START_SECONDS} s")


def main(host: str, hadron: str) -> None:
    """Runs the checks for one host."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        try:
            with server(SERVERS[host], log) as (url, _):
                command = [hadron, "eval", "tasks", "--base-url", url, "--concurrency", str(CONCURRENCY)]
                score = subprocess.run([*command, "--min-score", "1"], capture_output=True, text=True, check=False)
                print(score.stdout, score.stderr)
                if score.returncode != 0 or not re.search(rf"\b{QUESTIONS} of +{QUESTIONS}\b", score.stdout):
                    raise RuntimeError("not all questions were answered")
            if not POSITIVE_LINE.search(log.read_text()):
                raise RuntimeError(f"the log has no line like {POSITIVE_LINE.pattern!r}")
        except RuntimeError:
            print(log.read_text()[-8000:])
            raise
    print(f"{host}: {QUESTIONS} of {QUESTIONS} answers over HTTP")


if __name__ == "__main__":
    main(*sys.argv[1:])
