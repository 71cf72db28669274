#!/usr/bin/env python3
"""Compares Hadron with llama.cpp on the same cores; the two programs alternate in one run.

Shape: Qwen3-0.6B in bf16 with random weights. Both programs are measured by the same statistic:
  prefill  median of three prefills of 512 tokens in a round;
  decode   tokens of one run over its time (the mean over its steps), one run in a round;
  served   output tokens over the time of all requests; median time to first token.
Every printed figure is the median over the rounds, with the range, and the ratio is the median of the
ratios of the rounds, so that a drift of the machine's speed favours neither program.

The raw output of both programs is written to RAW, one file per program and round, together with the
commit and the processor. Commit that folder with the page that quotes it.

usage: llama_cpp.py --llama BIN_DIR --gguf FILE --model HF_FOLDER [--threads 2] [--rounds 5] [--raw RAW]
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


def run(a, name, *command):
    """Runs a program and returns its output, which is also written to the folder of raw outputs as `name`."""
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (a.raw / f"round{a.round}-{name}").write_text(text)
    return text


def llama_bench(a, name, *flags):
    """Tokens per second of each repetition that llama-bench reports."""
    text = run(a, f"llama-bench-{name}.json", f"{a.llama}/llama-bench", "-m", a.gguf, "-t", str(a.threads),
               *flags, "-o", "json")
    return json.loads(text)[0]["samples_ts"]


def llama_forward(a):
    """Tokens per second of each case that the benchmark reports."""
    found = {
        "prefill 512": statistics.median(llama_bench(a, "prefill", "-p", "512", "-n", "0", "-r", "3")),
        "decode 1": statistics.median(llama_bench(a, "decode", "-p", "0", "-n", "41", "-r", "1")),
    }
    text = run(a, "llama-batched-bench.txt", f"{a.llama}/llama-batched-bench", "-m", a.gguf, "-t", str(a.threads),
               "-tb", str(a.threads), "-c", "8192", "-b", "2048", "-ub", "512", "-npp", "8", "-ntg", "41",
               "-npl", "8,16,32", "-fa", "on")
    for line in text.splitlines():
        cells = [c.strip() for c in line.split("|") if c.strip()]
        if len(cells) >= 8 and cells[0] == "8" and cells[1] == "41":
            found[f"decode {cells[2]}"] = float(cells[7])
    return found


def hadron_forward(a):
    """Tokens per second by case, from the table that the benchmark prints: the median of its three prefills, and the
    mean over the 41 steps of a decode run."""
    found, columns = {}, []
    for line in run(a, "hadron-forward.txt", a.forward, str(a.threads)).splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")]
        if "tok/s" in cells:
            columns = cells
        if re.fullmatch(r"(prefill|decode) \d+", cells[0]):
            column = "tok/s" if cells[0].startswith("prefill") else "tok/s mean"
            found[cells[0]] = float(cells[columns.index(column)])
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
    """Seconds from the first request's start to each request's start, first and last event, and its number of output tokens."""
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
    assert len(out) == requests and all(o[3] == osl for o in out), "a request fell short"
    began = min(o[0] for o in out)
    return [dict(start=o[0] - began, first=o[1] - began, last=o[2] - began, tokens=o[3]) for o in out]


def served(a, name, command, port, path):
    """Output tokens per second and the median time to first token in seconds."""
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
        requests = load(port, 32, 16, 128, 64)
        (a.raw / f"round{a.round}-{name}-served.json").write_text(json.dumps(requests, indent=1) + "\n")
        rate = sum(r["tokens"] for r in requests) / max(r["last"] for r in requests)
        return rate, statistics.median(r["first"] - r["start"] for r in requests)
    finally:
        server.terminate()
        server.wait()


def llama_served(a):
    return served(a, "llama", [f"{a.llama}/llama-server", "-m", a.gguf, "-t", str(a.threads), "-tb", str(a.threads),
                               "-np", "16", "-c", "8192", "-b", "2048", "-ub", "512", "-fa", "on", "--port", "8099"],
                  8099, "/health")


def hadron_served(a):
    return served(a, "hadron", [a.hadron, "serve", a.model, "--served-model-name", "m", "--port", "8098"],
                  8098, "/readyz")


def machine():
    """Conditions of the measurement other than the programs: machine, model, and settings."""
    cpu = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
           if line.startswith("model name")]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {"commit": commit.stdout.strip(), "cpu": cpu[0] if cpu else "unknown", "cores": len(cpu),
            "load_average": Path("/proc/loadavg").read_text().split()[:3]}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama", required=True)
    p.add_argument("--gguf", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--hadron", default=str(ROOT / "target/release/hadron"))
    p.add_argument("--forward", help="the forward benchmark; found below target/release/deps by default")
    p.add_argument("--raw", type=Path, default=ROOT / "tests/bench/results/cpu/llama_cpp",
                   help="folder for the raw output of both programs")
    p.add_argument("--skip-served", action="store_true")
    a = p.parse_args()
    if not a.forward:
        built = [f for f in (ROOT / "target/release/deps").glob("forward-*") if re.fullmatch(r"forward-[0-9a-f]+", f.name)]
        a.forward = str(max(built, key=lambda f: f.stat().st_mtime))
    a.raw.mkdir(parents=True, exist_ok=True)

    pairs = {}
    for a.round in range(1, a.rounds + 1):
        (a.raw / f"round{a.round}-machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
        theirs, ours = llama_forward(a), hadron_forward(a)
        if not a.skip_served:
            theirs["served out tok/s"], theirs["served TTFT p50 s"] = llama_served(a)
            ours["served out tok/s"], ours["served TTFT p50 s"] = hadron_served(a)
        for case in theirs:
            pairs.setdefault(case, []).append((ours[case], theirs[case]))
        print(f"round {a.round}: {ours} against {theirs}", file=sys.stderr, flush=True)
    report(pairs)


def report(pairs):
    """Median over the rounds of each figure, and its range."""
    def spread(values):
        return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"

    print("| case | hadron | llama.cpp | ratio (median of rounds) | rounds |\n|---|---|---|---|---|")
    for case, values in pairs.items():
        ours, theirs = zip(*values)
        ratio = statistics.median(o / t for o, t in values)
        print(f"| {case} | {spread(ours)} | {spread(theirs)} | {ratio:.2f} | {len(values)} |")


if __name__ == "__main__":
    main()
