#!/usr/bin/env python3
"""Runs the GPU tests on emulated AMD machine code (gfx942, gfx950), which clang-22 generates from the kernels.

    amd_isa.py --turn N                 one architecture and one of four orders of wavefronts, selected by N
    amd_isa.py --all [--orders N] [--accept] [PAGE]
                                        both architectures, the first N of four orders each (default: all); writes the results to PAGE
                                        (default: RESULTS below)

Each run fails if the kernels that ran are not those of kernels/csrc/machine_code.txt, and if a kernel of CONFLICT_FREE has bank
conflicts. `--all` fails, and leaves PAGE as it is, if the cycles of a kernel's LDS accesses, divided by those without bank conflicts,
exceed the ratio in PAGE by more than LDS_TOLERANCE, or if a kernel with a ratio in PAGE no longer accesses LDS. With `--accept` it
writes the new ratios.

Compiled kernels are kept in Cargo's target folder. Needs (Debian): clang-22 lld-22 llvm-22.
"""
import argparse, collections, os, pathlib, re, subprocess, sys, tempfile, time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels/csrc"))
import machine_code

CODE = ROOT / "kernels/csrc/machine_code.txt"
RESULTS = ROOT / "tests/bench/results/cpu/amd_isa.md"
ARCHITECTURES = ["gfx942", "gfx950"]
# The tests of one-shot all-reduces, whose kernels run on several emulated GPUs, are in the crate `collectives`.
SUITES = [["--test", "gpu"], ["--test", "devices"]]
# Seeds of the four orders of wavefronts (`order` in kernels/emu/isa/workgroup.cpp). The page has the counters of the first.
SEEDS = range(4)
LDS_TOLERANCE = 0.1
# Kernels whose layouts of LDS avoid bank conflicts in the hot loop: the largest ratio of LDS cycles to those without conflicts.
CONFLICT_FREE = {"gemm": 1.02, "moe_grouped_gemm": 1.02, "fp8_gemm": 1.02, "moe_fp8_grouped_gemm": 1.02, "mla_decode": 1.1}
Run = collections.namedtuple("Run", "passed seconds counters")
# Counters of a kernel: `numbers` are the columns of counters.cpp from the number of wavefronts on, `workgroups` the pairs of LDS bytes
# and threads of its workgroups.
KernelCounters = collections.namedtuple("KernelCounters", "numbers workgroups")


def read_counters(path):
    """Sums the tables that processes have appended to a file. Returns KernelCounters by kernel."""
    totals = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        arch, kernel, *cells, workgroups = line.split("\t")
        if arch == "arch":
            continue
        numbers = [int(cell) for cell in cells]
        sizes = {tuple(map(int, size.split("/"))) for size in workgroups.split()}
        before = totals.get(kernel, KernelCounters([0] * len(numbers), set()))
        totals[kernel] = KernelCounters([a + b for a, b in zip(before.numbers, numbers)], before.workgroups | sizes)
    return totals


def recorded_kernels(compilations):
    """Returns the names of the kernels in machine_code.txt by architecture. `compilations`: its lines by compilation."""
    kernels = collections.defaultdict(set)
    for compilation, lines in compilations.items():
        kernels[compilation.rsplit(" for ", 1)[1]] |= {line.split(":")[0] for line in lines if not line.startswith("  ")}
    return kernels


def missing_and_unknown(ran, recorded):
    """Returns a text for each difference between the kernels that ran and those of machine_code.txt."""
    texts = {"recorded in machine_code.txt, but not launched by a test": recorded - ran,
             "launched, but not recorded in machine_code.txt": ran - recorded}
    return [f"{text}: {', '.join(sorted(kernels))}" for text, kernels in texts.items() if kernels]


def conflicts_in(counters):
    """Returns a text for each kernel of CONFLICT_FREE with bank conflicts."""
    ratios = {kernel: lds_ratio(counters[kernel].numbers) for kernel in CONFLICT_FREE if kernel in counters}
    return [f"{kernel} has LDS bank conflicts: ratio {ratio:.2f}, not at most {CONFLICT_FREE[kernel]}"
            for kernel, ratio in ratios.items() if ratio is not None and ratio > CONFLICT_FREE[kernel]]


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
        recorded = recorded_kernels(machine_code.read_recorded(CODE)[1])[arch]
        if errors := [*missing_and_unknown(set(totals), recorded), *conflicts_in(totals)]:
            sys.exit("\n".join(f"{arch}: {error}" for error in errors))
        return Run(passed, time.monotonic() - begun, totals)


def ratio(part, whole):
    return f"{part / whole:.2f}" if whole else "–"


def waves_by_lds(arch, workgroups):
    """Returns a text for the waves per SIMD that the LDS of the launched workgroups allows: the fewest and the most."""
    waves = sorted({machine_code.waves_by_lds(arch, lds_bytes, threads) for lds_bytes, threads in workgroups})
    return f"{waves[0]}–{waves[-1]}" if len(waves) > 1 else f"{waves[0]}"


def row(arch, kernel, counters):
    """A row of the page."""
    n = counters.numbers
    waves, valu, transcendental, _, matrix_cycles, salu, _, loads = n[:8]
    vector_waits, in_flight, _, _, lds_cycles, ideal = n[12:18]
    per_wave = lambda number: f"{number / waves:,.0f}"
    return (f"| `{kernel}` | {waves:,} | {per_wave(valu + transcendental)} | {per_wave(salu)} | {per_wave(matrix_cycles)} "
            f"| {per_wave(loads)} | {ratio(in_flight, vector_waits)} | {max(size for size, _ in counters.workgroups):,} "
            f"| {waves_by_lds(arch, counters.workgroups)} | {ratio(lds_cycles, ideal)} |")


def text_of(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def lds_ratio(n):
    """LDS cycles of a kernel divided by those without bank conflicts, rounded as in the page; None without LDS accesses.
    `n`: as KernelCounters.numbers."""
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


def worse_lds_ratios(recorded, runs):
    """Returns a text for each kernel with more bank conflicts than recorded, or without the LDS accesses that are recorded."""
    new = {(arch, kernel): lds_ratio(n.numbers) for arch, results in runs.items() for kernel, n in results[0].counters.items()}
    texts = []
    for (arch, kernel), before in sorted(recorded.items()):
        now = new.get((arch, kernel))
        if now is None:
            texts.append(f"{arch}, {kernel}: no LDS accesses, recorded is {before:.2f}")
        elif now > before + LDS_TOLERANCE + 1e-9:
            texts.append(f"{arch}, {kernel}: {now:.2f}, recorded is {before:.2f}")
    return texts


def commit():
    """Returns the commit, and whether files of kernels/ differ from it."""
    changed = text_of(["git", "status", "--porcelain", "--", "kernels"])
    return text_of(["git", "rev-parse", "--short=8", "HEAD"]) + (" with uncommitted changes of kernels/" if changed else "")


def page(runs):
    """The page of `runs`: by architecture, a Run for each of SEEDS."""
    compiler = text_of(["clang-22", "--version"]).splitlines()[0]
    kernels = {arch: len(results[0].counters) for arch, results in runs.items()}
    lines = [
        "# GPU tests on emulated AMD machine code", "",
        "No AMD GPU was used. clang compiles the kernels, and the emulator (`kernels/emu/isa`) runs the generated instructions:",
        "[AMD status](../../../../docs/amd-status.md).", "",
        f"- {time.strftime('%Y-%m-%d')}, commit {commit()}, {compiler}. Command: `just amd-isa --orders {max(map(len, runs.values()))}`.",
        *(f"- {arch}: {results[0].passed} tests passed in {len(results)} of {len(SEEDS)} orders of wavefronts, all {kernels[arch]} kernels of machine_code.txt ran; "
          f"{', '.join(f'{result.seconds:.0f}' for result in results)} s." for arch, results in runs.items()),
        "- `.ci/run` runs one architecture in one order per push, drawn by the hash of the commit.",
        "- Tests of paths that exist on NVIDIA only (TMA, WGMMA) return early and count as passed.", "",
        "Columns: instructions per wavefront in the first order, over all launches of the tests, which are small. *In flight*: vector memory operations in",
        "flight at each wait for them. *LDS bytes*: most static and dynamic LDS of a workgroup. *Waves by LDS*: waves per SIMD that the LDS of the",
        "workgroups allows, in the launches with the most and with the least LDS; registers may allow fewer (`machine_code.txt`). *LDS*: cycles of LDS",
        "accesses, divided by those without bank conflicts, with the lane groups and banks of `kernels/emu/isa/lds_banks.h`.",
    ]
    for arch, results in runs.items():
        lines += ["", f"## {arch}", "", "| kernel | wavefronts | VALU | SALU | MFMA cycles | loads | in flight | LDS bytes | waves by LDS | LDS |",
                  "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
        lines += [row(arch, kernel, counters) for kernel, counters in sorted(results[0].counters.items())]
    return "\n".join(lines) + "\n"


def run_all(path, orders, accepts):
    recorded = recorded_lds_ratios(path)
    runs = {arch: [run(arch, seed) for seed in SEEDS[:orders]] for arch in ARCHITECTURES}
    worse = worse_lds_ratios(recorded, runs)
    if worse and not accepts:
        sys.exit("\n".join(["other LDS bank conflicts than recorded; if they are right, use --accept:", *worse]))
    path.write_text(page(runs))
    print(f"results: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--turn", type=int)
    mode.add_argument("--all", action="store_true")
    parser.add_argument("--orders", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    parser.add_argument("--accept", action="store_true")
    parser.add_argument("page", nargs="?", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args()
    if args.all:
        run_all(args.page, args.orders, args.accept)
    else:
        arch = ARCHITECTURES[args.turn % 2]
        result = run(arch, args.turn // 2)
        print(f"{arch}: {result.passed} tests passed on machine code, {len(result.counters)} kernels ran, {result.seconds:.0f} s")


if __name__ == "__main__":
    main()
