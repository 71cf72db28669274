#!/usr/bin/env python3
"""Checks the server's `/metrics` with `promtool check metrics`, and lets Debian's Prometheus scrape it with the committed configuration.

Findings that vLLM's own names cause are listed below; any other is a failure. Every expression of the
committed Grafana dashboard must be answered by that Prometheus, and every series it names must exist.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

from hadron_server import ROOT, Server

DOCS = ROOT / "docs" / "observability"
# Accepted findings of promtool: metric names with a colon, as all of vLLM's have, and a histogram named `_total`.
INHERITED = [
    re.compile(r"^(vllm|hadron):\S+ metric names should not contain ':'$"),
    re.compile(r'^vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix$'),
]
SCRAPE_EVERY_S = 1
# Series of MoE models, which the demo model does not export; these must be documented.
OF_EXPERTS = {"hadron:expert_load_max_over_mean"}


def install():
    if shutil.which("promtool") and shutil.which("prometheus"):
        return
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "prometheus"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def lint(page):
    run = subprocess.run(["promtool", "check", "metrics"], input=page, text=True, capture_output=True)
    findings = [line.strip() for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    new = [line for line in findings if not any(known.search(line) for known in INHERITED)]
    assert not new, "promtool finds:\n" + "\n".join(new)
    # promtool exits with 3 if it has findings, and with 1 if it cannot parse the page.
    assert run.returncode in (0, 3), run
    print(f"promtool: the page parses; {len(findings)} findings, all of vLLM's names")


def expressions():
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", [])]
    return [target["expr"] for target in targets]


def query(base, expression):
    text = expression.replace("$__rate_interval", "10s").replace("$model", ".*")
    url = f"{base}/api/v1/query?" + urllib.parse.urlencode({"query": text})
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{expression}: {error.read().decode()}") from error


def until(what, check, limit_s=30):
    end = time.monotonic() + limit_s
    while True:
        try:
            found = check()
        except urllib.error.URLError:
            found = None
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        time.sleep(0.3)


def scrape(server):
    config = (DOCS / "prometheus.yml").read_text()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        ours = config.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        ours = ours.replace("scrape_interval: 15s", f"scrape_interval: {SCRAPE_EVERY_S}s")
        path = folder / "prometheus.yml"
        path.write_text(ours)
        subprocess.run(["promtool", "check", "config", str(DOCS / "prometheus.yml")], check=True,
                       stdout=subprocess.DEVNULL)
        port = free_port()
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
                   f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        prometheus = subprocess.Popen(command)
        try:
            ask_prometheus(f"http://127.0.0.1:{port}", server)
        finally:
            prometheus.terminate()
            prometheus.wait(timeout=30)


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def ask_prometheus(base, server):
    until("a Prometheus", lambda: urllib.request.urlopen(base + "/-/ready", timeout=5).status == 200)
    until("a first scrape", lambda: [r for r in query(base, "up") if r["value"][1] == "1"])
    for i in range(10):
        server.complete(f"request number {i}")
        time.sleep(0.2)
    page = server.get("/metrics")
    generated = float(re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.M)[1])
    same = lambda: any(float(r["value"][1]) == generated for r in query(base, "vllm:generation_tokens_total"))
    until("the scraped count", same)
    time.sleep(2 * SCRAPE_EVERY_S)
    exported = set(re.findall(r"^([a-z_]+:?[a-z0-9_]+)(?:\{| )", page, re.M))
    known = set(re.findall(r"^\| `([^`]+)`", (DOCS / "metrics.md").read_text(), re.M))
    for expression in expressions():
        named = set(re.findall(r"\b((?:vllm|hadron|process)[:_][a-z0-9_]+)", expression))
        if named & OF_EXPERTS:
            assert named <= known, f"{expression}: no model has {named - known}"
            continue
        assert named <= exported, f"{expression}: there is no {named - exported}"
        assert query(base, expression), f"{expression}: no answer"
    print(f"prometheus: scraped {generated:.0f} tokens, all {len(expressions())} expressions are answered")


def main():
    install()
    # Two panels have no data here: an optional metric, and ranks that share a model.
    with Server("--kv-cache-metrics", "--tensor-parallel-size", "2") as server:
        for i in range(10):
            server.complete(f"hello {i}", stream=i % 2 == 0, n=1 + i % 2)
        lint(server.get("/metrics"))
        scrape(server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
