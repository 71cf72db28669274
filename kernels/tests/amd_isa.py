#!/usr/bin/env python3
"""Runs the GPU tests on emulated AMD machine code (gfx942, gfx950), which clang-22 generates from the kernels.

    amd_isa.py --turn N                 one architecture and one of four orders of wavefronts, selected by N
    amd_isa.py --all [--accept] [PAGE]  both architectures, four orders each; writes the results to PAGE (default: RESULTS below)

`--all` fails, and leaves PAGE as it is, if the cycles of a kernel's LDS accesses, divided by those without bank conflicts,
exceed the ratio in PAGE by more than LDS_TOLERANCE. With `--accept` it writes the larger ratio.

Compiled kernels are kept in Cargo's target folder. Needs (Debian): clang-22 lld-22 llvm-22.
"""
import collections, os, pathlib, re, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results/cpu/amd_isa.md"
ARCHITECTURES = ["gfx942", "gfx950"]
# The tests of one-shot all-reduces, whose kernels run on several emulated GPUs, are in the crate `collectives`.
SUITES = [["--test", "gpu"], ["--test", "devices"]]
# Seeds of the four orders of wavefronts (`order` in kernels/emu/isa/workgroup.cpp). The page has the counters of the first.
SEEDS = range(4)
LDS_TOLERANCE = 0.1
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


def lds_ratio(n):
    """LDS cycles of a kernel divided by those without bank conflicts, rounded as in the page; None without LDS accesses.
    `n`: as in row()."""
    cycles, ideal = n[16:18]
    return round(cycles / ideal, 2) if ideal else None


def recorded_lds_ratios(path):
    """Returns the ratios in the last column of a page by architecture and kernel; none if the page does not exist."""
    found, arch = {}, None
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("## "):
            arch = line.removeprefix("## ")
        elif line.startswith("| `") and not line.endswith("| – |"):
            cells = line.strip("| ").split(" | ")
            found[arch, cells[0].strip("`")] = float(cells[-1])
    return found


def grown_lds_ratios(recorded, runs):
    """Returns a text for each kernel with more bank conflicts than recorded."""
    new = {(arch, kernel): lds_ratio(n) for arch, results in runs.items() for kernel, n in results[0].counters.items()}
    return [f"{arch}, {kernel}: {ratio:.2f}, recorded is {recorded[arch, kernel]:.2f}"
            for (arch, kernel), ratio in sorted(new.items())
            if ratio is not None and (arch, kernel) in recorded and ratio > recorded[arch, kernel] + LDS_TOLERANCE + 1e-9]


def page(runs):
    """The page of `runs`: by architecture, a Run for each of SEEDS."""
    compiler = text_of(["clang-22", "--version"]).splitlines()[0]
    lines = [
        "# GPU tests on emulated AMD machine code", "",
        "No AMD GPU was used. clang compiles the kernels, and the emulator (`kernels/emu/isa`) runs the generated instructions:",
        "[AMD status](../../../../docs/amd-status.md).", "",
        f"- {time.strftime('%Y-%m-%d')}, commit {text_of(['git', 'rev-parse', '--short=8', 'HEAD'])}, {compiler}. Command: `just amd-isa`.",
        *(f"- {arch}: {results[0].passed} tests passed in each of {len(results)} orders of wavefronts, {len(results[0].counters)} kernels ran; "
          f"{', '.join(f'{result.seconds:.0f}' for result in results)} s." for arch, results in runs.items()),
        "- Tests of paths that exist on NVIDIA only (TMA, WGMMA) return early and count as passed.", "",
        "Columns: instructions per wavefront in the first order, over all launches of the tests, which are small. *In flight*: vector memory operations in",
        "flight at each wait for them. *LDS*: cycles of LDS accesses, divided by those without bank conflicts (32 banks).",
    ]
    for arch, results in runs.items():
        lines += ["", f"## {arch}", "", "| kernel | wavefronts | VALU | SALU | MFMA cycles | loads | in flight | LDS |",
                  "|---|--:|--:|--:|--:|--:|--:|--:|"]
        lines += [row(kernel, numbers) for kernel, numbers in sorted(results[0].counters.items())]
    return "\n".join(lines) + "\n"


def run_all(path, accepts):
    recorded = recorded_lds_ratios(path)
    runs = {arch: [run(arch, seed) for seed in SEEDS] for arch in ARCHITECTURES}
    grown = grown_lds_ratios(recorded, runs)
    if grown and not accepts:
        sys.exit("\n".join(["more LDS bank conflicts than recorded; if they are right, use --accept:", *grown]))
    path.write_text(page(runs))
    print(f"results: {path}")


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--turn":
        turn = int(sys.argv[2])
        arch = ARCHITECTURES[turn % 2]
        result = run(arch, turn // 2)
        print(f"{arch}: {result.passed} tests passed on machine code, {len(result.counters)} kernels ran, {result.seconds:.0f} s")
    elif sys.argv[1:2] == ["--all"]:
        rest = [argument for argument in sys.argv[2:] if argument != "--accept"]
        if len(rest) > 1:
            sys.exit(__doc__)
        run_all(pathlib.Path(rest[0]) if rest else RESULTS, "--accept" in sys.argv)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
