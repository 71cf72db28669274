"""Runs schemathesis until enough cases were sent, and monitors the server meanwhile."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request

st, wanted, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
URL, MODEL, SERVER = os.environ["URL"], os.environ["MODEL"], os.environ["SERVER"]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Approximate number of routes in the document, which is the number of cases in a run per requested example.
ROUTES = 24


def resident_kib():
    with open(f"/proc/{SERVER}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read()).group(1))


def good_ms():
    """Sends a valid request, which the server must complete."""
    body = json.dumps({"model": MODEL, "prompt": "What is", "max_tokens": 4, "seed": 1}).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
    begun = time.monotonic()
    with urllib.request.urlopen(request) as reply:
        json.load(reply)
    return (time.monotonic() - begun) * 1e3


def run(examples, seed):
    """Runs schemathesis once; returns the number of cases sent, and whether all checks passed."""
    command = [st, "run", f"{URL}/openapi.json", "--checks", CHECKS, "--max-examples", str(examples),
               "--seed", str(seed), "--header", "Authorization: Bearer admin", "--request-timeout", "60",
               "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)  # schemathesis writes a cache to its working directory.
    sent = [int(n) for n in re.findall(r"(\d+) generated", done.stdout)]
    print(done.stdout[-6000:] if done.returncode else done.stdout[-700:])
    return (sent[-1] if sent else 0), done.returncode == 0


before_ms = sorted(good_ms() for _ in range(20))
examples, cases, seed, passed, resident = max(1, wanted // ROUTES // 4), 0, 1, True, []
begun = time.monotonic()
while cases < wanted and passed:
    sent, passed = run(examples, seed)
    if sent == 0:
        sys.exit("no case was sent")
    cases, seed = cases + sent, seed + 1
    resident.append(resident_kib())
after_ms = sorted(good_ms() for _ in range(20))
p95 = lambda times: times[int(len(times) * 0.95)]
print(f"{cases} cases in {time.monotonic() - begun:.0f} s; resident KiB after each run {resident}; "
      f"a valid request, median and p95: before {before_ms[10]:.1f} and {p95(before_ms):.1f} ms, "
      f"after {after_ms[10]:.1f} and {p95(after_ms):.1f} ms")
sys.exit(0 if passed else 1)
