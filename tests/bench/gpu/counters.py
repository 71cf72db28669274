#!/usr/bin/env python3
"""Hardware counters of Hadron's kernels on an AMD GPU, summed per kernel: instructions by kind and LDS bank conflicts.

    counters.py COMMAND...       runs COMMAND under rocprofv3, once per group of counters, and prints a Markdown table
    counters.py --csv FILE...    prints the table of counter_collection.csv files that rocprofv3 has written

The emulator of machine code counts the same quantities (HIPEMU_COUNTERS). If rocprofv3 counts nothing for a group, its counters are
counted one at a time; those that the GPU does not have are named and left out.
"""

import collections
import csv
import pathlib
import shutil
import subprocess
import sys
import tempfile

# A GPU counts a few of these at a time.
GROUPS = [
    ["SQ_WAVES", "SQ_INSTS_VALU", "SQ_INSTS_SALU", "SQ_INSTS_MFMA"],
    ["SQ_INSTS_VMEM_RD", "SQ_INSTS_VMEM_WR", "SQ_INSTS_LDS"],
    ["SQ_LDS_BANK_CONFLICT", "SQ_LDS_IDX_ACTIVE"],
    ["SQ_WAIT_INST_ANY", "SQ_BUSY_CYCLES"],
]


def read(files):
    """Sums of counters by kernel name and counter name, and the number of dispatches of each kernel."""
    sums, dispatches = collections.defaultdict(float), collections.defaultdict(set)
    for file in files:
        with open(file, newline="") as lines:
            for row in csv.DictReader(lines):
                kernel, counter = row["Kernel_Name"].removesuffix(".kd"), row["Counter_Name"]
                sums[kernel, counter] += float(row["Counter_Value"])
                dispatches[kernel, counter].add((file, row["Process_Id"], row["Dispatch_Id"]))
    # Each group of counters is counted in a run of its own, so the dispatches of different counters are the same ones.
    counts = collections.defaultdict(int)
    for (kernel, _), found in dispatches.items():
        counts[kernel] = max(counts[kernel], len(found))
    return sums, counts


def table(files):
    sums, dispatches = read(files)
    present = {counter for _, counter in sums}
    counters = [counter for group in GROUPS for counter in group if counter in present]
    lines = ["| kernel | dispatches | " + " | ".join(counters) + " |", "|---|---:|" + "---:|" * len(counters)]
    for kernel in sorted(dispatches):
        cells = [f"{sums[kernel, counter]:,.0f}" if (kernel, counter) in sums else "" for counter in counters]
        lines.append(f"| {kernel} | {dispatches[kernel]:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def count(counters, command, folder):
    """Files of one run that counts a group. There is none if the GPU lacks a counter, even if the exit status is 0."""
    done = subprocess.run(["rocprofv3", "--pmc", *counters, "--output-format", "csv", "-d", folder, "--", *command],
                          capture_output=True, text=True)
    found = sorted(folder.rglob("*counter_collection.csv"))
    if done.returncode or not found:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        print(f"not counted: {' '.join(counters)}: {reason}", file=sys.stderr)
        return []
    return found


def profile(command):
    if not shutil.which("rocprofv3"):
        sys.exit("rocprofv3 is not installed")
    files = []
    with tempfile.TemporaryDirectory() as name:
        for number, group in enumerate(GROUPS):
            found = count(group, command, pathlib.Path(name) / str(number))
            if not found and len(group) > 1:
                found = [file for counter in group for file in count([counter], command, pathlib.Path(name) / counter)]
            files += found
        if not files:
            sys.exit("rocprofv3 has counted nothing")
        print(table(files))


def main():
    words = sys.argv[1:]
    if not words:
        sys.exit(__doc__)
    if words[0] == "--csv":
        print(table(words[1:]))
    else:
        profile(words)


if __name__ == "__main__":
    main()
