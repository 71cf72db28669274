"""Runs `hadron serve` with the demo model, which publishes KV events, for the scripts of this folder."""

import http.client
import json
import signal
import socket
import subprocess
import threading
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count):
    """The first of `count` consecutive free ports."""
    while True:
        first, probes = free_port(), []
        try:
            for port in range(first, first + count):
                probes.append(socket.create_server(("127.0.0.1", port)))
            return first
        except (OSError, OverflowError):
            continue
        finally:
            for probe in probes:
                probe.close()


class Server:
    """A server that runs until it is closed. Its ports are the same after a restart; each replica has two ports for KV events."""

    def __init__(self, binary, events, arguments=(), replicas=1):
        self.binary, self.arguments = binary, list(arguments)
        if replicas > 1:
            self.arguments += ["--data-parallel-size", str(replicas)]
        self.publish = free_ports(2 * replicas)
        self.replay = self.publish + replicas
        self.events = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{self.publish}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
            **events,
        }
        self.start()

    def start(self):
        line = [self.binary, "serve", "--port", "0", *self.arguments]
        line += ["--kv-events-config", json.dumps(self.events)]
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        said = ""
        for text in self.process.stderr:
            said += text
            if " on http://" in text:
                host, port = text.split(" on http://")[1].split()[0].split(":")
                self.host, self.port = host, int(port)
                break
        else:
            raise SystemExit(f"the server did not start:\n{said}")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def restart(self):
        self.process.kill()
        self.process.wait(60)
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop()

    def call(self, method, path, body=None, attempts=1):
        return call(self.host, self.port, method, path, body, attempts)

    def complete(self, tokens, **extra):
        body = {"prompt": tokens, "max_tokens": 1, "ignore_eos": True, **extra}
        return self.call("POST", "/v1/completions", body)

    def source(self):
        return self.call("GET", "/kv_event_sources")["0"]


def call(host, port, method, path, body=None, attempts=1):
    """The JSON reply to a request; fails on any status but success."""
    for attempt in range(attempts):
        connection = http.client.HTTPConnection(host, port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            reply = connection.getresponse()
            text = reply.read().decode()
            if reply.status // 100 != 2:
                raise RuntimeError(f"{method} {path}: {reply.status} {text}")
            return json.loads(text) if text else None
        except OSError:
            if attempt + 1 == attempts:
                raise
            time.sleep(0.2)
        finally:
            connection.close()
