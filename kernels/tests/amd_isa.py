#!/usr/bin/env python3
"""Runs the GPU tests on emulated AMD machine code (gfx942, gfx950), which clang-22 generates from the kernels.

    amd_isa.py --turn N        one architecture, selected by N; N is also the seed of the order of wavefronts
    amd_isa.py --all [PAGE]    both architectures; writes the results to PAGE (default: RESULTS below)

Compiled kernels are kept in Cargo's target folder. Needs (Debian): clang-22 lld-22 llvm-22.
"""
import collections, os, pathlib, re, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results/cpu/amd_isa.md"
ARCHITECTURES = ["gfx942", "gfx950"]
# The tests of one-shot all-reduces, whose kernels run on several emulated GPUs, are in the crate `collectives`.
SUITES = [["--test", "gpu"], ["--test", "devices"]]
Run = collections.namedtuple("Run", "passed seconds counters")


def read_counters(path):
    """Sums the tables that processes have appended to a file. Returns a list of numbers per kernel."""
    totals = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        arch, kernel, *cells = line.split("\t")
        if arch == "arch":
            continue
        numbers = [int(cell) for cell in cells]
        totals[kernel] = [a + b for a, b in zip(totals.get(kernel, [0] * len(numbers)), numbers)]
    return totals


def run(arch, seed):
    """Runs all suites on one architecture; ends the process if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        counters = pathlib.Path(folder) / "counters"
        inherited = {name: value for name, value in os.environ.items() if name != "HADRON_GPU"}
        environment = inherited | {"HIPEMU_ISA": arch, "HIPEMU_SEED": str(seed), "HIPEMU_COUNTERS": str(counters)}
        passed, begun = 0, time.monotonic()
        for suite in SUITES:
            result = subprocess.run(["cargo", "test", "-q", *suite], cwd=ROOT, env=environment, text=True, errors="replace",
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            found = re.search(r"test result: ok\. (\d+) passed", result.stdout)
            if result.returncode or not found or found[1] == "0":
                sys.exit(f"{arch}, HIPEMU_SEED={seed}:\n{result.stdout}")
            passed += int(found[1])
        totals = read_counters(counters)
        if not totals:
            sys.exit(f"{arch}: no kernel ran as machine code")
        return Run(passed, time.monotonic() - begun, totals)


def ratio(part, whole):
    return f"{part / whole:.2f}" if whole else "–"


def row(kernel, n):
    """A row of the page. `n`: the columns of counters.cpp, from the number of wavefronts on."""
    waves, valu, transcendental, _, matrix_cycles, salu, _, loads = n[:8]
    vector_waits, in_flight, _, _, lds_cycles, ideal = n[12:18]
    per_wave = lambda number: f"{number / waves:,.0f}"
    return (f"| `{kernel}` | {waves:,} | {per_wave(valu + transcendental)} | {per_wave(salu)} | {per_wave(matrix_cycles)} "
            f"| {per_wave(loads)} | {ratio(in_flight, vector_waits)} | {ratio(lds_cycles, ideal)} |")


def text_of(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(runs):
    compiler = text_of(["clang-22", "--version"]).splitlines()[0]
    lines = [
        "# GPU tests on emulated AMD machine code", "",
        "No AMD GPU was used. clang compiles the kernels, and the emulator (`kernels/emu/isa`) runs the generated instructions:",
        "[AMD status](../../../../docs/amd-status.md).", "",
        f"- {time.strftime('%Y-%m-%d')}, commit {text_of(['git', 'rev-parse', '--short=8', 'HEAD'])}, {compiler}. Command: `just amd-isa`.",
        *(f"- {arch}: {run.passed} tests passed, {len(run.counters)} kernels ran; {run.seconds:.0f} s." for arch, run in runs.items()),
        "- Tests of paths that exist on NVIDIA only (TMA, WGMMA) return early and count as passed.", "",
        "Columns: instructions per wavefront, over all launches of the tests, which are small. *In flight*: vector memory operations in",
        "flight at each wait for them. *LDS*: cycles of LDS accesses, divided by those without bank conflicts (32 banks).",
    ]
    for arch, result in runs.items():
        lines += ["", f"## {arch}", "", "| kernel | wavefronts | VALU | SALU | MFMA cycles | loads | in flight | LDS |",
                  "|---|--:|--:|--:|--:|--:|--:|--:|"]
        lines += [row(kernel, numbers) for kernel, numbers in sorted(result.counters.items())]
    return "\n".join(lines) + "\n"


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--turn":
        turn = int(sys.argv[2])
        arch = ARCHITECTURES[turn % 2]
        result = run(arch, turn // 2)
        print(f"{arch}: {result.passed} tests passed on machine code, {len(result.counters)} kernels ran, {result.seconds:.0f} s")
    elif len(sys.argv) in (2, 3) and sys.argv[1] == "--all":
        path = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else RESULTS
        path.write_text(page({arch: run(arch, 0) for arch in ARCHITECTURES}))
        print(f"results: {path}")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
