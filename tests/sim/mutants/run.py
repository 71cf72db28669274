#!/usr/bin/env python3
"""Shows that the simulator finds injected faults: those at the edges of the scheduler, and every patch in this folder.

    run.py [NAME ...] [--jobs N] [--out PAGE]

Each patch is a single mistake in the scheduler or the KV cache. The tree (tracked and new files) is copied to
target/mutants-sim/tree; there each patch is applied in turn, and seeds of the simulator run until one fails. Without
NAMEs all patches and the faults of `tests/sim/fault_injector.rs` run. Prints a table of fault, seed, and the first
thing noticed; --out also writes it as a page. Exits with 1 if a fault is not found.
"""

import argparse
import dataclasses
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WORK = ROOT / "target" / "mutants-sim"
TREE = WORK / "tree"
TIMEOUT_S = 1200
# A line of `injected_faults::print_failure`.
FOUND = re.compile(r"^(\w+) +(\d+)  (.+)$", re.M)


@dataclasses.dataclass
class Row:
    """Result of one injected fault: its location, the first seed that fails, and the invariant that this seed violates."""

    name: str
    place: str
    text: str
    seed: str = ""
    noticed: str = "NOT FOUND"


def copy_tree():
    """Copies changed files of the working tree; build outputs of the last run stay valid for the rest."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for old in [path for path in TREE.rglob("*") if path.is_file()] if TREE.exists() else []:
        if str(old.relative_to(TREE)) not in names:
            old.unlink()
    for name in sorted(names):
        source, copy = ROOT / name, TREE / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)


def apply(patch, *flags):
    # The copy is in a folder of a repository, which git must not treat as the repository of the copy.
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(WORK)}
    subprocess.run(["git", "apply", *flags, str(patch)], cwd=TREE, env=env, check=True)


def simulate(jobs, *test):
    """Runs tests of the simulator in the copy of the tree; returns their output."""
    env = os.environ | {"CARGO_TARGET_DIR": os.environ.get("CARGO_TARGET_DIR") or str(WORK / "build"), "RUSTFLAGS": "-Awarnings"}
    command = ["cargo", "test", "-q", "--locked", "-p", "scheduler", "--test", "sim", "--profile", "mutants", "-j", str(jobs)]
    built = subprocess.run([*command, "--no-run"], cwd=TREE, env=env, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"the simulator does not compile:\n{built.stderr}")
    try:
        ran = subprocess.run([*command, "--", *test, "--nocapture", "--test-threads", "1"], cwd=TREE, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode()
    return ran.stdout


def snake_case(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def edge_rows(jobs):
    source = (ROOT / "tests/sim/fault_injector.rs").read_text()
    body = source.split("enum InjectedFault {", 1)[1].split("\n}", 1)[0]
    rows = [Row(snake_case(name), "edge", text.strip()) for text, name in re.findall(r"/// (.+)\n    (\w+),", body)]
    found = {name: (seed, noticed) for name, seed, noticed in FOUND.findall(simulate(jobs, "injected_faults::every"))}
    for row in rows:
        for name, (seed, noticed) in found.items():
            if snake_case(name) == row.name:
                row.seed, row.noticed = seed, noticed
    return rows


def patch_row(patch, jobs):
    row = Row(patch.stem, "patch", patch.read_text().splitlines()[0].removeprefix("# "))
    apply(patch)
    try:
        output = simulate(jobs, "--ignored", "--exact", "injected_faults::patched_code_is_found")
    finally:
        apply(patch, "-R")
    for name, seed, noticed in FOUND.findall(output):
        if name == "PatchedCode":
            row.seed, row.noticed = seed, noticed
    return row


def show(row):
    print(f"{row.name:<36} {row.place:<6} {row.seed:>10}  {row.noticed}", flush=True)


def write_page(path, rows):
    found = sum(row.noticed != "NOT FOUND" for row in rows)
    seeds = sorted(int(row.seed) % 1_000_000_000 for row in rows if row.seed)
    cell = lambda text: text.replace("|", "\\|").replace("`", "'")
    lines = [
        "# Injected faults",
        "",
        f"TL;DR: the simulator finds {found} of {len(rows)} injected faults, the slowest after {seeds[-1] + 1} seeds.",
        "",
        f"- {datetime.date.today()}, `just mutants` (`tests/sim/mutants/run.py`, which writes this page), of the tree committed with it.",
        "- *edge*: `tests/sim/fault_injector.rs` alters what the scheduler receives and returns, at every `cargo test` (`just canary`).",
        "- *patch*: a file `NAME.patch` in `tests/sim/mutants` is applied to a copy of the tree. `tests/tidy` checks that each still applies.",
        "- Seeds from 1,000,000,000 on are worlds of one lockstep group, those from 3,000,000,000 on worlds with window groups, those from 4,000,000,000 on worlds with state groups; the others run from seed 0.",
        "",
        "| fault | | what it does | seed | first thing noticed |",
        "|---|---|---|--:|---|",
    ]
    lines += [f"| `{row.name}` | {row.place} | {cell(row.text)} | {row.seed} | {cell(row.noticed)} |" for row in rows]
    path.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    patches = sorted(HERE.glob("*.patch"))
    unknown = set(options.names) - {patch.stem for patch in patches}
    if unknown:
        sys.exit(f"no such patch: {', '.join(sorted(unknown))}")
    copy_tree()
    rows = [] if options.names else edge_rows(options.jobs)
    for row in rows:
        show(row)
    for patch in patches:
        if not options.names or patch.stem in options.names:
            rows.append(patch_row(patch, options.jobs))
            show(rows[-1])
    if options.out:
        write_page(options.out, rows)
    missed = [row.name for row in rows if row.noticed == "NOT FOUND"]
    print(f"{len(rows) - len(missed)} of {len(rows)} found")
    sys.exit(f"not found: {', '.join(missed)}" if missed else 0)


main()
