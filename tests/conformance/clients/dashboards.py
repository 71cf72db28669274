#!/usr/bin/env python3
"""Checks that every metric queried by the dashboards of vLLM's release exists after ten requests.

The dashboards come from vLLM's source archive on PyPI, pinned by its digest and kept under target/.
GONE lists names in them that this vLLM release itself no longer exports.
"""

import hashlib
import json
import re
import sys
import tarfile
import urllib.parse
import urllib.request

from hadron_server import ROOT, Server

INDEX = "https://pypi.org/simple/vllm/"
ARCHIVE = "vllm-0.33.0.tar.gz"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
DASHBOARDS = re.compile(r"/examples/.*\.(json|ya?ml)$")
# Metric names that dashboards query but vLLM 0.33 does not export; there are none.
GONE = set()
# Metrics that routers and autoscalers read, in addition to the dashboards.
OTHERS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_generation_tokens_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
}


def archive():
    path = ROOT / "target" / "conformance" / ARCHIVE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(INDEX, timeout=60) as reply:
            base, page = reply.geturl(), reply.read().decode()
        links = re.findall(r'href="([^"]+)"', page)
        link = next(link for link in links if f"/{ARCHIVE}" in link)
        whole = path.with_suffix(".part")
        urllib.request.urlretrieve(urllib.parse.urljoin(base, link), whole)
        whole.rename(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == SHA256, f"{path} has the digest {digest}"
    return path


def asked_for():
    """Metric names by the dashboard that queries them."""
    names = {}
    with tarfile.open(archive()) as tar:
        for member in tar:
            if member.isfile() and DASHBOARDS.search(member.name):
                text = tar.extractfile(member).read().decode(errors="replace")
                found = set(re.findall(r"vllm:[a-z0-9_]+", text))
                if found:
                    names[member.name] = found
    assert len(names) >= 3, f"only {sorted(names)} ask for metrics"
    return names


def main():
    names = asked_for()
    with Server() as server:
        for i in range(10):
            server.complete(f"dashboard {i}", stream=i % 2 == 0)
        page = server.get("/metrics")
        json.loads(server.get("/load"))
    exported = set(re.findall(r"^(vllm:[a-z0-9_]+)[{ ]", page, re.M))
    for dashboard, wanted in sorted({**names, "routers and autoscalers": OTHERS}.items()):
        missing = wanted - exported - GONE
        assert not missing, f"{dashboard} asks for {sorted(missing)}"
        print(f"{dashboard}: all {len(wanted)} names are there")
    useless = GONE & exported
    assert not useless, f"exported after all: {useless}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
