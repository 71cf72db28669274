#!/usr/bin/env python3
"""Counts duplicated windows of lines per 10,000 lines of Rust code.

Lines are normalised: comments and white space at both ends are removed, then empty lines, lines without a letter or
digit, and `use` lines. A window is WINDOW successive normalised lines of one file. Each window whose text occurred
before, in the same or another file, counts as one duplicate.

usage: duplicate_windows.py [FOLDER...]        default: kernels/src of the current folder
"""

import pathlib
import re
import sys

WINDOW = 6


def normalised(text):
    lines = (re.sub(r"//.*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if re.search(r"[A-Za-z0-9]", line) and not re.match(r"(pub(\(.*?\))? )?use ", line)]


def main():
    files = sorted(path for folder in sys.argv[1:] or ["kernels/src"] for path in pathlib.Path(folder).rglob("*.rs"))
    seen, duplicates, lines = set(), 0, 0
    for path in files:
        code = normalised(path.read_text())
        lines += len(code)
        for at in range(len(code) - WINDOW + 1):
            window = tuple(code[at:at + WINDOW])
            duplicates += window in seen
            seen.add(window)
    rate = 10_000 * duplicates / max(lines, 1)
    print(f"{duplicates} duplicate windows of {WINDOW} lines in {lines} lines of {len(files)} files: {rate:.0f} per 10,000 lines")


if __name__ == "__main__":
    main()
