#!/usr/bin/env python3
"""Runs `.ci/run` twice, from an empty build folder and again, and writes where its time goes to tests/bench/results/cpu/gate.md,
between the lines BEGIN and END of that page. Text outside of these lines is kept. Fails if a run took longer than its limit.

    times.py [--folder FOLDER]      FOLDER (default target/gate-times) is emptied first; the machine should do nothing else
    times.py --page COLD WARM       only write the page, of figures that `.ci/run` has written with GATE_TIMES=FILE
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAGE = ROOT / "tests/bench/results/cpu/gate.md"
BEGIN, END = "<!-- written by tests/bench/gate/times.py: begin -->", "<!-- written by tests/bench/gate/times.py: end -->"
# Minutes that each part of the gate may take, from an empty build folder and with a warm one. A change that adds a suite to
# the gate adds a line.
Allowance = collections.namedtuple("Allowance", "part cold warm")
ALLOWANCES = [
    Allowance("steps of commit 3f41a2e", 35, 22),
    Allowance("coding agents and API tests", 2, 2),
    Allowance("AMD machine code", 4, 4),
    Allowance("KV groups", 3, 3),
    Allowance("model families", 3, 3),
    Allowance("models under vLLM and SGLang", 6, 6),
]
# Additions in the loop that states the speed of the machine. Global names make it as slow as `python3 -c`.
LOOP_ADDITIONS = 20_000_000
LOOP = f"total = 0\nfor _ in range({LOOP_ADDITIONS}): total += 1"
Line = collections.namedtuple("Line", "wall cpu kind name")


def read(path):
    """The records of a file that `.ci/timed` has written, one per line."""
    cells = [line.split("\t") for line in pathlib.Path(path).read_text().splitlines()]
    return [Line(float(wall), float(cpu), kind, name) for wall, cpu, kind, name in cells]


def run(folder, figures):
    figures.unlink(missing_ok=True)
    environment = os.environ | {"CARGO_TARGET_DIR": str(folder), "GATE_TIMES": str(figures)}
    begun = time.monotonic()
    subprocess.run([ROOT / ".ci/run"], env=environment, check=True)
    with figures.open("a") as file:
        file.write(f"{time.monotonic() - begun:.1f}\t0\tall\tall\n")


def limit_s(side):
    """The limit of a run in seconds: `side` is "cold" or "warm"."""
    return 60 * sum(getattr(allowance, side) for allowance in ALLOWANCES)


def loop_seconds():
    """Processor time of a loop of additions in Python, in seconds: it compares the speed of machines."""
    begun = time.process_time()
    exec(LOOP, {})
    return time.process_time() - begun


def table(cold, warm, kind):
    """Table of steps or of test executables, longest first, with the times of both runs."""
    names = list(dict.fromkeys(line.name for line in cold if line.kind == kind))
    found = {side: {line.name: line for line in lines if line.kind == kind} for side, lines in (("cold", cold), ("warm", warm))}
    none = Line(0, 0, kind, "")
    rows = [(name, found["cold"][name], found["warm"].get(name, none)) for name in names]
    rows.sort(key=lambda row: -row[1].wall)
    return [f"| {name} | {c.wall:,.0f} | {c.cpu:,.0f} | {w.wall:,.0f} | {w.cpu:,.0f} |" for name, c, w in rows if c.wall >= 1 or w.wall >= 1]


def page(cold, warm):
    whole = {side: next(line.wall for line in lines if line.kind == "all") for side, lines in (("cold", cold), ("warm", warm))}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    head = "| {} | cold: wall, s | cold: CPU, s | warm: wall, s | warm: CPU, s |\n|---|---:|---:|---:|---:|"
    parts = ", ".join(f"{allowance.part} {allowance.cold} (warm {allowance.warm})" for allowance in ALLOWANCES)
    return "\n".join([
        "## Newest complete measurement", "",
        f"`.ci/run` takes {whole['cold']:,.0f} s ({whole['cold'] / 60:.1f} min) from an empty build folder and {whole['warm']:,.0f} s "
        f"({whole['warm'] / 60:.1f} min) with a warm one.", "",
        f"- {time.strftime('%Y-%m-%d')}, commit {commit}, {model}, {os.cpu_count()} cores; a loop of {LOOP_ADDITIONS:,} additions in Python takes "
        f"{loop_seconds():.1f} s there. Command: `just gate-times`.",
        f"- Limits: {limit_s('cold') // 60} and {limit_s('warm') // 60} minutes. Allowances in minutes: {parts}.",
        "- The step `clients` runs at the same time as the steps for kernels. CPU seconds include all child processes.", "",
        "### Steps", "", head.format("step"), *table(cold, warm, "step"), "",
        "### Test binaries in `cargo test`", "", head.format("package: target"), *table(cold, warm, "test")])


def with_measurement(text, measurement):
    """Returns the page `text` with another part between BEGIN and END; ends the process if it lacks these lines."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE} has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{measurement}\n{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target/gate-times")
    parser.add_argument("--page", nargs=2, type=pathlib.Path)
    arguments = parser.parse_args()
    figures = arguments.page
    if not figures:
        folder = arguments.folder.resolve()
        shutil.rmtree(folder, ignore_errors=True)
        figures = [folder.with_name(folder.name + f"-{side}.tsv") for side in ("cold", "warm")]
        for path in figures:
            run(folder, path)
    cold, warm = map(read, figures)
    measurement = page(cold, warm)
    PAGE.write_text(with_measurement(PAGE.read_text(), measurement))
    print(measurement)
    late = [side for side, lines in (("cold", cold), ("warm", warm))
            if next(line.wall for line in lines if line.kind == "all") > limit_s(side)]
    if late:
        sys.exit(f"over the limit: {', '.join(late)}")


if __name__ == "__main__":
    main()
