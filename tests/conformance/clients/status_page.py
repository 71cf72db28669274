#!/usr/bin/env python3
"""The status page at `/` in a real headless Chromium, driven over WebDriver.

It must show model, device, uptime and running requests, refresh itself, load nothing from other hosts, report when the server is
unreachable, and recover afterwards.
"""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from hadron_server import ROOT, Server

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def install():
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    packages = ["chromium", "chromium-driver"]
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Browser:
    """A WebDriver session with one headless browser."""

    def __init__(self, base, profile):
        self.base = base
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1100,900"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options,
                  "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.path = "/session/" + session["sessionId"]

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=90) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from error

    def open(self, url):
        self.call("POST", self.path + "/url", {"url": url})

    def run(self, script):
        return self.call("POST", self.path + "/execute/sync", {"script": script, "args": []})

    def text(self, name):
        return self.run(f"return document.getElementById('{name}').innerText")

    def until(self, what, script, limit_s=20):
        end = time.monotonic() + limit_s
        while True:
            found = self.run("return " + script)
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {limit_s} s; the page says {self.text('state')!r}")
            time.sleep(0.2)

    def complaints(self):
        entries = self.call("POST", self.path + "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def picture(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("GET", self.path + "/screenshot")))


@contextlib.contextmanager
def browser():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/status", timeout=5
                ) as reply:
                    if json.load(reply)["value"]["ready"]:
                        break
                time.sleep(0.1)
            page = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield page
            finally:
                page.call("DELETE", page.path)
        finally:
            driver.terminate()
            driver.wait(timeout=30)


def look_at_load(page):
    page.until("running requests", "Number(document.getElementById('running').innerText) > 0")
    page.until("rows of steps", "document.querySelectorAll('#steps tr td').length > 8")
    page.until("a share of the cache", "parseFloat(document.getElementById('kv').innerText) > 0")
    page.until("tokens per second", "parseFloat(document.getElementById('rate').innerText) > 0")
    top, half = (float(page.text(name).replace(",", "")) for name in ("rate-top", "rate-half"))
    assert top == 2 * half and top >= 1, f"the scale ends at {top}, its middle is {half}"
    assert page.text("model") == "hadron-demo", page.text("model")
    assert page.text("devices").startswith("cpu"), page.text("devices")
    assert page.text("uptime").endswith((" s", " min")), page.text("uptime")
    page.picture(ROOT / "target" / "conformance" / "status_page.png")


def look(page, server):
    page.open(server.url + "/")
    page.until("a first answer", "document.getElementById('state').innerText.startsWith('Serving')")
    assert page.text("running") == "0", page.text("running")
    seen = threading.Event()

    def ask():  # The request is repeated, because one may finish before the page polls the server.
        while not seen.is_set():
            server.complete("once upon a time", max_tokens=400, n=4, seed=1)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        look_at_load(page)
    finally:
        seen.set()
        asking.join()
    page.until("idleness", "document.getElementById('running').innerText === '0'")
    elsewhere = page.run(
        "return performance.getEntriesByType('resource').map(e => e.name)"
        ".filter(name => !name.startsWith(location.origin) && !name.startsWith('data:'))"
    )
    assert not elsewhere, f"the page loads {elsewhere}"
    assert not page.complaints(), page.complaints()


def main():
    install()
    with browser() as page:
        # The KV pool is small, so that a few requests use a visible share of it.
        with Server("--num-gpu-blocks-override", "512") as server:
            port = server.port
            look(page, server)
            version = page.text("version")
        down = "document.body.classList.contains('down')"
        page.until("that the server is gone", down)
        assert "is unreachable; last update" in page.text("state"), page.text("state")
        with Server("--port", str(port)):
            page.until("that the server is back", "!" + down)
    print(f"status page: version {version}, current, reports an unreachable server, and recovers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
