#!/usr/bin/env python3
"""guidellm from PyPI and `hadron bench serve` measure the same server alternately and must agree.

The server is the real one over a device with constant steps of 200 ms (tests/bench/http/paced_server.rs), so differences
are caused by the generators and not by the machine. Prompts and outputs have equal token counts for both:
these counts must agree. Of each figure the medians over ROUNDS (1) are compared, and may differ by
WITHIN_PERCENT (15): machines of CI are busy, and a client in Python notices. `just load-generators` asks for
5 rounds within 5 % and its result is in tests/bench/results/cpu/load_generators.md.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from sdk_venv import enter

# Newer releases of guidellm depend on torch (3 GB). The other packages are pinned because pip's dependency resolution would be slow.
enter("guidellm==0.3.1", "transformers==4.57.1", "tokenizers==0.22.2", "huggingface_hub==0.36.2",
      "datasets==4.4.1", "click==8.1.8")

from hadron_server import ROOT, binary  # noqa: E402 (inside the environment)

CONCURRENCY, WAVES, OUTPUT_TOKENS, WORDS = 4, 8, 16, 32
REQUESTS = CONCURRENCY * WAVES
ROUNDS = int(os.environ.get("ROUNDS", 1))
WITHIN = float(os.environ.get("WITHIN_PERCENT", 15)) / 100
# guidellm has two times per token. This one excludes the first token, as that of `hadron bench serve` does.
FIGURES = ("output tok/s", "TTFT ms", "time per token ms")


def paced():
    """The process of the paced server and its address; the process exits when its standard input is closed."""
    command = ["cargo", "test", "--quiet", "--locked", "--test", "bench", "--", "--ignored", "--exact",
               "http::paced_server::serve_until_stdin_closes", "--nocapture"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        found = re.search(r"paced server on (http://\S+)", line)
        if found:
            return server, found[1]
    raise AssertionError(f"no paced server: exit {server.wait()}")


def ours(url, folder):
    """Runs `hadron bench serve`; returns its figures, and the token counts of all prompts and outputs."""
    result = folder / "hadron.json"
    command = [binary(), "bench", "serve", "--base-url", url, "--endpoint", "completions", "--prompts", "text",
               "--input-len", str(WORDS), "--output-len", str(OUTPUT_TOKENS), "--concurrency", str(CONCURRENCY),
               "--num-prompts", str(REQUESTS), "--output", str(result)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    level = json.loads(result.read_text())["levels"][0]
    assert level["errors"] == 0 and level["requests"] == REQUESTS, level
    figures = (level["output_tok_s"], level["ttft_ms"]["p50"], level["tpot_ms"]["p50"])
    return figures, (level["prompt_tokens"], level["output_tokens"])


def theirs(url, folder):
    """Runs guidellm; returns its figures, and the token counts of all prompts and outputs."""
    prompts, result = folder / "prompts.jsonl", folder / "guidellm.json"
    # The words have the form that `hadron bench serve` uses, so the token counts are equal for any tokenizer that splits digits.
    words = [f"w{100 + i * 7 % 400}" for i in range(REQUESTS * WORDS)]
    texts = [" ".join(words[i * WORDS : (i + 1) * WORDS]) for i in range(REQUESTS)]
    lines = [json.dumps({"prompt": text, "output_tokens_count": OUTPUT_TOKENS}) for text in texts]
    prompts.write_text("\n".join(lines) + "\n")
    tool = pathlib.Path(sys.executable).parent / "guidellm"
    columns = {"prompt_column": "prompt", "output_tokens_count_column": "output_tokens_count"}
    command = [tool, "benchmark", "run", "--target", url, "--processor", ROOT / "tests" / "data" / "demo",
               "--data", prompts, "--data-args", json.dumps(columns), "--rate-type", "concurrent",
               "--rate", str(CONCURRENCY), "--max-requests", str(REQUESTS), "--output-path", result,
               "--backend-args", json.dumps({"http2": False}), "--disable-progress", "--disable-console-outputs"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                   "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HOME": str(folder / "hf")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0 and result.exists(), run.stdout[-4000:] + run.stderr[-4000:]
    [report] = json.loads(result.read_text())["benchmarks"]
    made = report["run_stats"]["requests_made"]
    assert made["successful"] == made["total"] == REQUESTS, made
    of = {name: metric["successful"] for name, metric in report["metrics"].items()}
    figures = (of["output_tokens_per_second"]["mean"], of["time_to_first_token_ms"]["median"],
               of["inter_token_latency_ms"]["median"])
    return figures, tuple(round(of[name]["total_sum"]) for name in ("prompt_token_count", "output_token_count"))


def compare(url, folder):
    """Figures of both load generators by round, measured alternately; fails if their token counts differ."""
    rounds = []
    for number in range(ROUNDS):
        measured = {}
        for tool in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            measured[tool] = tool(url, folder)
        (mine, my_tokens), (others, other_tokens) = measured[ours], measured[theirs]
        assert my_tokens == other_tokens, f"tokens of prompts and answers: {my_tokens} and {other_tokens}"
        print(f"round {number}: hadron bench {shown(mine)}, guidellm {shown(others)}", flush=True)
        rounds.append((mine, others))
    assert my_tokens[1] == REQUESTS * OUTPUT_TOKENS, my_tokens
    return rounds, my_tokens


def shown(figures):
    return " / ".join(f"{figure:.2f}" for figure in figures)


def main():
    server, url = paced()
    try:
        with tempfile.TemporaryDirectory() as folder:
            rounds, tokens = compare(url, pathlib.Path(folder))
    finally:
        server.stdin.close()
        server.wait(timeout=60)
    print(f"{REQUESTS} requests, {CONCURRENCY} at a time; both count {tokens[0]} prompt and {tokens[1]} output tokens")
    wrong = []
    for place, name in enumerate(FIGURES):
        mine, other = (statistics.median(pair[tool][place] for pair in rounds) for tool in (0, 1))
        difference = other / mine - 1
        print(f"{name}: hadron bench {mine:.2f}, guidellm {other:.2f} ({difference:+.1%})")
        if abs(difference) > WITHIN:
            wrong.append(name)
    assert not wrong, f"they disagree on {wrong} by more than {WITHIN:.0%}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
