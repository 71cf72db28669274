#!/usr/bin/env python3
"""Hadron next to llama.cpp on the same cores: the two programs take turns in one run.

Shape: Qwen3-0.6B in bf16 with random weights. Every figure is the median over the rounds, and the
ratio is the median of the per-round ratios, so that a machine whose speed drifts does not favour
whoever ran in the better minute.

usage: llama_cpp.py --llama BIN_DIR --gguf FILE --model HF_FOLDER [--threads 2] [--rounds 5]
  BIN_DIR holds llama-bench, llama-batched-bench and llama-server; FILE and HF_FOLDER hold one model.
needs: cargo build --release; cargo bench --no-run -p executor --bench forward
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def llama_prefill(a):
    rows = json.loads(run(f"{a.llama}/llama-bench", "-m", a.gguf, "-t", str(a.threads),
                          "-p", "512", "-n", "0", "-r", "2", "-o", "json"))
    return {"prefill 512": rows[0]["avg_ts"]}


def llama_decode(a):
    rows = json.loads(run(f"{a.llama}/llama-bench", "-m", a.gguf, "-t", str(a.threads),
                          "-p", "0", "-n", "48", "-r", "2", "-o", "json"))
    return {"decode 1": rows[0]["avg_ts"]}


def llama_batched(a):
    text = run(f"{a.llama}/llama-batched-bench", "-m", a.gguf, "-t", str(a.threads), "-tb", str(a.threads),
               "-c", "8192", "-b", "2048", "-ub", "512", "-npp", "16", "-ntg", "32", "-npl", "8,16,32", "-fa", "on")
    found = {}
    for line in text.splitlines():
        cells = [c.strip() for c in line.split("|") if c.strip()]
        if len(cells) >= 8 and cells[0] == "16" and cells[1] == "32":
            found[f"decode {cells[2]}"] = float(cells[7])
    return found


def hadron_forward(a):
    """Tokens per second by case, from the table that the benchmark prints."""
    found, columns = {}, []
    for line in run(a.forward, str(a.threads)).splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if "tok/s" in cells:
            columns = cells
        if re.fullmatch(r"(prefill|decode) \d+", cells[0]):
            found[cells[0]] = float(cells[columns.index("tok/s")])
    return found


def stream_one(port, prompt, osl, out):
    body = dict(model="m", prompt=prompt, max_tokens=osl, temperature=0.0, stream=True, ignore_eos=True,
                stream_options={"include_usage": True})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    start, first, last, tokens = time.perf_counter(), None, None, 0
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if event.get("choices"):
                last = time.perf_counter()
                first = first or last
    out.append((start, first, last, tokens))


def load(port, requests, concurrency, isl, osl):
    """Output tokens per second and the median time to first token in seconds."""
    rng = random.Random(1)
    prompts = [[rng.randrange(100, 150_000) for _ in range(isl)] for _ in range(requests)]
    out, lock = [], threading.Lock()

    def worker():
        while True:
            with lock:
                if not prompts:
                    return
                prompt = prompts.pop()
            stream_one(port, prompt, osl, out)

    threads = [threading.Thread(target=worker) for _ in range(concurrency)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    span = max(o[2] for o in out) - min(o[0] for o in out)
    assert len(out) == requests and all(o[3] == osl for o in out), "a request fell short"
    return sum(o[3] for o in out) / span, statistics.median(o[1] - o[0] for o in out)


def served(command, port, path):
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as reply:
                    if reply.status == 200:
                        break
            except OSError:
                pass
            assert server.poll() is None, f"{command[0]} ended early"
            time.sleep(0.2)
        load(port, 2, 2, 16, 4)
        return load(port, 32, 16, 128, 64)
    finally:
        server.terminate()
        server.wait()


def llama_served(a):
    return served([f"{a.llama}/llama-server", "-m", a.gguf, "-t", str(a.threads), "-tb", str(a.threads), "-np", "16",
                   "-c", "8192", "-b", "2048", "-ub", "512", "-fa", "on", "--port", "8099"], 8099, "/health")


def hadron_served(a):
    return served([a.hadron, "serve", a.model, "--served-model-name", "m", "--port", "8098"], 8098, "/readyz")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama", required=True)
    p.add_argument("--gguf", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--hadron", default=str(ROOT / "target/release/hadron"))
    p.add_argument("--forward", help="the forward benchmark; found below target/release/deps by default")
    p.add_argument("--skip-served", action="store_true")
    a = p.parse_args()
    if not a.forward:
        built = [f for f in (ROOT / "target/release/deps").glob("forward-*") if re.fullmatch(r"forward-[0-9a-f]+", f.name)]
        a.forward = str(max(built, key=lambda f: f.stat().st_mtime))

    pairs = {}
    for r in range(a.rounds):
        theirs = llama_prefill(a) | llama_decode(a) | llama_batched(a)
        ours = hadron_forward(a)
        if not a.skip_served and r < 3:
            theirs["served out tok/s"], theirs["served TTFT p50 s"] = llama_served(a)
            ours["served out tok/s"], ours["served TTFT p50 s"] = hadron_served(a)
        for case in theirs:
            pairs.setdefault(case, []).append((ours[case], theirs[case]))
        print(f"round {r + 1}: {ours} against {theirs}", file=sys.stderr, flush=True)
    print("| case | hadron | llama.cpp | ratio (median of rounds) | rounds |\n|---|---|---|---|---|")
    for case, values in pairs.items():
        ours, theirs = zip(*values)
        ratio = statistics.median(o / t for o, t in values)
        print(f"| {case} | {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | {ratio:.2f} | {len(values)} |")


if __name__ == "__main__":
    main()
