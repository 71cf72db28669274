"""A Hadron server with the demo model for the scripts of this folder: start, requests, stop.

Standard library only. HADRON names the binary; without it, target/debug/hadron is built if need be.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[3]


def binary():
    """Path of the `hadron` executable to test."""
    named = os.environ.get("HADRON")
    if named:
        return named
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--bin", "hadron"], cwd=ROOT, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return str(target / "debug" / "hadron")


class Server:
    """A `hadron serve` process on a free port; a context manager that stops it at the end."""

    def __init__(self, *flags):
        command = [binary(), "serve", "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        self.url = None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"serves \S+ on (http://\S+)", line)
            if found:
                self.url = found[1]
                break
        assert self.url, "the server did not start:\n" + "".join(self.log)
        threading.Thread(target=self.log.extend, args=(self.process.stderr,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return reply.read().decode()

    def complete(self, prompt, **fields):
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", body, head)
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read().decode()

    def stop(self, number=signal.SIGTERM):
        """Stops the server with SIGTERM; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)
