#!/usr/bin/env python3
"""Prints the report of first_day_amd.sh as Markdown: first_day_report.py OUT PARAGRAPH...

OUT has steps.tsv (a line per step: name, result) and a log per step, NAME.log. The report has the given paragraphs, the table of
steps, results and failures of the steps that are test suites, and the output of the other steps.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITES = ["conformance", "conformance-serialized", "collectives", "goldens"]
OUTPUTS = ["doctor", "accuracy", "ops", "speed", "counters"]
LINES_MAX = 200  # of the output of a step
PANIC_LINES_MAX = 12


def failed_tests(lines):
    """Names of the failed tests in the output of libtest, which lists them after the last line `failures:` of a binary."""
    found, listed = [], False
    for line in lines:
        if line == "failures:":
            listed = True
        elif listed and re.fullmatch(r"    \S+", line):
            found.append(line.strip())
        elif line.startswith("test result: "):
            listed = False
    return list(dict.fromkeys(found))


def panics(lines):
    """Messages of panics, each with the test (the name of the thread) and the place in its first line."""
    found = []
    for number, line in enumerate(lines):
        if re.search(r"thread '.*' .*panicked at ", line):
            message = [line[line.index("thread '"):]]
            for following in lines[number + 1:number + PANIC_LINES_MAX]:
                if re.match(r"note: |test |thread '|FAILED$|failures:$", following):
                    break
                message.append(following)
            found.append("\n".join(message).rstrip())
    return found


def block(text):
    return f"```\n{text}\n```"


def suite(lines):
    """Section of a test suite: its results, the failed tests, and why they failed."""
    results = [line for line in lines if line.startswith("test result: ")]
    failed, messages = failed_tests(lines), panics(lines)
    parts = [block("\n".join(results))] if results else []
    if failed:
        parts.append("Failed tests:\n\n" + "\n".join(f"- `{name}`" for name in failed))
        parts.append(block("\n\n".join(messages)))
    elif not results or any(not line.startswith("test result: ok") for line in results):
        parts.append(block("\n".join(lines[-20:])))
    return "\n\n".join(parts)


def report(out, paragraphs):
    steps = [line.split("\t", 1) for line in (out / "steps.tsv").read_text().splitlines()]
    parts = ["# First day on AMD GPUs", *paragraphs]
    parts.append("\n".join(["| step | result |", "|---|---|", *(f"| {name} | {result} |" for name, result in steps)]))
    for name in SUITES + OUTPUTS:
        log = out / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        if lines:
            parts += [f"## {name}", suite(lines) if name in SUITES else block("\n".join(lines[-LINES_MAX:]))]
    # Paths of this machine say nothing to readers.
    return "\n\n".join(parts).replace(f"{out}/", "OUT/").replace(f"{ROOT}/", "") + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(report(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]), end="")
