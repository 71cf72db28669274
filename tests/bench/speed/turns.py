#!/usr/bin/env python3
"""Compares two builds of Hadron on one machine, alternating: medians over rounds, and ratios with their range.

    turns.py cpu OLD NEW [--rounds 3] [--out FOLDER]
    turns.py gpu OLD NEW [--rounds 3] [--models qwen3-8b,...] [--levels 1,64,256] [--files qwen3-0.6b] [--out FOLDER]

OLD and NEW are folders that `build.sh` has written. Each round runs every case with both builds, the older one first
in rounds 1, 3, ..., so that a drift of the machine's speed favours neither. The figure of a build is the median over
rounds; the ratio is the median of the rounds' ratios. Exits with 1 if a figure is worse by more than --within percent (2), a start by more than 10.

`gpu` serves synthetic weights (`shapes.py`, or the model folders in --shapes) over HTTP, 1,024 tokens in and 256 out, and loads
both builds with NEW's `hadron bench serve`. `cpu` times forward passes of a model, the scheduler's step, tokens over SSE on a zero-time device,
and requests with a prefix hit. Both time starts from a checkpoint in the page cache.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
START_WITHIN = 10.0
GPU_MODELS = "qwen3-0.6b,qwen3-8b,qwen3-8b-fp8,qwen3-30b-a3b"


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value of one case in one round, with its name and unit."""

    name: str
    unit: str
    value: float
    more_is_better: bool
    within: float = 0  # percent by which the figure may be worse, if that is more than --within


def run(command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def rows_of(table):
    """Cells of each line of a Markdown table."""
    for line in table.splitlines():
        if line.startswith("|") and not line.startswith(("|-", "|:")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


class Server:
    """A `hadron serve` process on its own port, from the time at which it is ready."""

    def __init__(self, build, arguments, log):
        self.log = open(log, "w+")
        begun = time.monotonic()
        self.process = subprocess.Popen([str(build / "hadron"), "serve", *arguments, "--port", "0"],
                                        stderr=self.log, stdout=self.log)
        self.url = self.wait_for_address(log)
        self.ready_s = time.monotonic() - begun

    def wait_for_address(self, log):
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            found = re.search(r" serves .*?(http://[\w.:]+)", pathlib.Path(log).read_text())
            if found:
                with urllib.request.urlopen(found[1] + "/readyz", timeout=10) as reply:
                    assert reply.status == 200
                return found[1]
            if self.process.poll() is not None:
                sys.exit(f"the server ended:\n{pathlib.Path(log).read_text()[-4000:]}")
            time.sleep(0.02)
        sys.exit("the server was not ready after 600 s")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def load(new, server, folder, *arguments):
    """Figures of each concurrency level in the report of `hadron bench serve`; fails unless all requests succeeded."""
    result = folder / "load.json"
    run([new / "hadron", "bench", "serve", "--base-url", server.url, "--output", result, *arguments])
    levels = json.loads(result.read_text())["levels"]
    failed = [level for level in levels if level["errors"]]
    if failed:
        sys.exit(f"requests failed: {failed}")
    return levels


def config_of(arguments, model):
    return json.loads((arguments.shapes / model / "config.json").read_text())


def start_from_files(build, new, model, arguments, folder):
    """The median of three starts from a checkpoint on disk, which is in the page cache; kernels were compiled before."""
    written = folder / f"{model}-files"
    if not written.exists():
        run([new / "hadron", "synth", arguments.shapes / model, written])
    length = min(4096, config_of(arguments, model)["max_position_embeddings"])
    ready = []
    for _ in range(4):
        server = Server(build, [written, "--device", arguments.device, "--max-model-len", str(length), *arguments.serve.split()],
                        folder / "log")
        ready.append(server.ready_s)
        server.stop()
    return Figure(f"{model}, ready from files", "s", statistics.median(ready[1:]), False, START_WITHIN)


def gpu_case(build, new, model, arguments, folder):
    """Figures of a GPU server: start-up time, one request at a time, then each level of concurrency."""
    server = Server(build, [arguments.shapes / model, "--served-model-name", model, "--load-format", "synth", "--device",
                            arguments.device, "--max-num-seqs", str(arguments.max_num_seqs), "--no-enable-prefix-caching", *arguments.serve.split()],
                    folder / "log")
    yield Figure(f"{model}, ready", "s", server.ready_s, False, START_WITHIN)
    ids = min(100_000, config_of(arguments, model)["vocab_size"])
    shape = ["--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len), "--vocab-size", str(ids)]
    for level in arguments.levels.split(","):
        count = str(arguments.prompts or max(12, 2 * int(level)))
        found = load(new, server, folder, *shape, "--concurrency", level, "--num-prompts", count, "--warmup", "1")[0]
        if level == "1":
            yield Figure(f"{model}, 1 request, time per token", "ms", found["tpot_ms"]["p50"], False)
            yield Figure(f"{model}, 1 request, time to first token", "ms", found["ttft_ms"]["p50"], False)
        else:
            yield Figure(f"{model}, {level} requests, output", "tok/s", found["output_tok_s"], True)
    server.stop()


def gpu(build, new, arguments, folder):
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{build.name}")
    for model in filter(None, arguments.models.split(",")):
        yield from gpu_case(build, new, model, arguments, folder)
    yield start_from_files(build, new, arguments.files, arguments, folder)


def cached_prefixes(build, new, folder):
    """Latency of requests over HTTP for one token after a prefix hit of 960 tokens, on the demo model."""
    server = Server(build, ["--threads", "1"], folder / "log")
    found = load(new, server, folder, "--input-len", "992", "--shared-prefix", "960", "--output-len", "1", "--concurrency", "16",
                 "--num-prompts", "2000", "--warmup", "16")[0]
    server.stop()
    return Figure("cached prefixes, 16 requests at a time", "requests/s", found["requests_per_s"], True)


def cpu(build, new, arguments, folder):
    for cells in rows_of(run([build / "step"])):
        if cells[0][0].isdigit() and len(cells) > 6:
            yield Figure(f"scheduler step, {cells[0]} running, {cells[1]} in flight", "us", float(cells[2].split()[0]), False)
    for cells in rows_of(run([build / "forward", str(os.cpu_count())])):
        if cells[0].startswith(("prefill", "decode")):
            yield Figure(f"Qwen3-0.6B shape, {cells[0]}", "ms", float(cells[1]), False)
    streams = [cells for cells in rows_of(run([build / "http", "--ignored", "--exact", "--nocapture", "http::tokens_per_second"]))
               if re.match(r"(completions|chat) \(\d\)", cells[0])]
    for kind in ("completions", "chat"):
        rates = [float(cells[1].replace(",", "")) for cells in streams if cells[0].startswith(kind)]
        yield Figure(f"server-sent events, {kind}", "tok/s", statistics.median(rates), True)
    yield cached_prefixes(build, new, folder)
    yield start_from_files(build, new, arguments.files, arguments, folder)


def judged(rounds, within):
    """Lines of the result table, and the names of the figures that are worse than permitted."""
    lines, worse = [], []
    for name in rounds[0]["old"]:
        pairs = [(found["old"][name], found["new"][name]) for found in rounds]
        ratios = sorted(new.value / old.value for old, new in pairs)
        ratio, figure = statistics.median(ratios), pairs[0][0]
        loss = 1 - ratio if figure.more_is_better else ratio - 1
        if loss > max(within, figure.within) / 100:
            worse.append(name)
        medians = [statistics.median(pair[side].value for pair in pairs) for side in (0, 1)]
        lines.append(f"| {name} | {figure.unit} | {medians[0]:,.4g} | {medians[1]:,.4g} | {ratio:.3f} | "
                     f"{ratios[0]:.3f}–{ratios[-1]:.3f} | {'higher' if figure.more_is_better else 'lower'} |")
    return lines, worse


def about_machine(kind, build, device):
    if kind == "gpu":
        vendor = json.loads(run([build / "hadron", "doctor", "--json", "--device", device]))["gpus"][0]
        driver = next(library["version"] for library in vendor["libraries"] if library["role"] == "driver")
        return f"{vendor['devices'][0]['name']}, driver {driver}"
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return f"{model[1]}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["cpu", "gpu"])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, default=2.0, help="percent by which a figure may be worse")
    parser.add_argument("--models", default=GPU_MODELS, help="empty: only starts from files")
    parser.add_argument("--levels", default="1,64,256")
    parser.add_argument("--files", default="qwen3-0.6b", help="shape whose checkpoint is written and started from")
    parser.add_argument("--shapes", type=pathlib.Path, help="folder of model folders (default: those of shapes.py)")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--prompts", type=int, help="requests per level (default: twice the level, at least 12)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--serve", default="", help="further arguments of `hadron serve`")
    parser.add_argument("--device", help="default: cpu or cuda")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.device = arguments.device or {"cpu": "cpu", "gpu": "cuda"}[arguments.kind]
    builds = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    case = {"cpu": cpu, "gpu": gpu}[arguments.kind]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if not arguments.shapes:
            run([sys.executable, HERE / "../gpu/shapes.py", folder])
            arguments.shapes = folder
        rounds = []
        for number in range(arguments.rounds):
            found = {}
            for side in ("old", "new") if number % 2 == 0 else ("new", "old"):
                figures = case(builds[side], builds["new"], arguments, folder)
                found[side] = {figure.name: figure for figure in figures}
                for figure in found[side].values():
                    print(f"round {number + 1}, {side}: {figure.name}: {figure.value:,.4g} {figure.unit}", flush=True)
            rounds.append(found)
    commits = {side: json.loads((build / "about.json").read_text()) for side, build in builds.items()}
    lines, worse = judged(rounds, arguments.within)
    page = "\n".join([
        f"{time.strftime('%Y-%m-%d')}, {about_machine(arguments.kind, builds['new'], arguments.device)}; {len(rounds)} alternating rounds; "
        + "; ".join(f"{side}: {about['commit']} ({about['profile']})" for side, about in commits.items()), "",
        "| figure | unit | old | new | new / old | range | better |", "|---|---|---:|---:|---:|---:|---|", *lines])
    print(page)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{arguments.kind}.md").write_text(page + "\n")
        raw = [{side: [dataclasses.asdict(figure) for figure in figures.values()] for side, figures in found.items()} for found in rounds]
        (arguments.out / f"{arguments.kind}.json").write_text(json.dumps({"builds": commits, "rounds": raw}, indent=1) + "\n")
    if worse:
        sys.exit(f"worse by more than {arguments.within:g} %: " + "; ".join(worse))


if __name__ == "__main__":
    main()
