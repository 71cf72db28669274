"""Compares the prefix hits that Dynamo's indexer predicts with Hadron's cached-token counts: dynamo_indexer.py BINARY LOG"""

import os
import random
import socket
import subprocess
import sys
import threading
import time

from kv_server import Server, call, free_port

BLOCK = 16
REQUESTS = int(os.environ.get("REQUESTS", 300))
REPLICAS = int(os.environ.get("REPLICAS", 2))


class Proxy:
    """TCP proxy from a free port to port `to`; its connections can be cut."""

    def __init__(self, to):
        self.to, self.port, self.open, self.pairs = to, free_port(), True, []
        self.listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            try:
                if not self.open:
                    raise ConnectionRefusedError
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            self.pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def carry(source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self):
        self.open = False
        for near, far in self.pairs:
            for end in (near, far):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self.pairs.clear()

    def mend(self):
        self.open = True


class Indexer:
    """A process `python -m dynamo.indexer` that is configured with one server."""

    def __init__(self, server, publish, log, replicas=1):
        self.port = free_port()
        line = [sys.executable, "-m", "dynamo.indexer", "--block-size", str(BLOCK), "--port", str(self.port)]
        self.process = subprocess.Popen(line, stdout=log, stderr=log)
        for rank in range(replicas):
            worker = {
                "instance_id": 1,
                "endpoint": f"tcp://127.0.0.1:{publish + rank}",
                "replay_endpoint": f"tcp://127.0.0.1:{server.replay + rank}",
                "model_name": "default",
                "block_size": BLOCK,
                "dp_rank": rank,
            }
            call("127.0.0.1", self.port, "POST", "/register", worker, attempts=600)

    def score(self, tokens, rank=0):
        """Number of leading tokens that the indexer considers cached by a replica."""
        body = {"model_name": "default", "token_ids": tokens}
        scores = call("127.0.0.1", self.port, "POST", "/query", body).get("scores") or {}
        return scores.get("1", {}).get(str(rank), 0)

    def knows(self, tokens, within_s, rank=0):
        """Waits until the indexer has the last block of a prompt, and therefore all earlier events."""
        whole, end = len(tokens) // BLOCK * BLOCK, time.time() + within_s
        while self.score(tokens, rank) != whole:
            if time.time() > end:
                return False
            time.sleep(0.005)
        return True

    def close(self):
        self.process.terminate()
        self.process.wait(30)


class Traffic:
    """Prompts with shared prefixes: prefixes of a few long documents of any length, with unique suffixes."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.documents = [[self.chance.randrange(200, 500) for _ in range(400)] for _ in range(6)]
        self.compared = self.cached = 0

    def prompt(self):
        document = self.chance.choice(self.documents)
        start = document[: self.chance.randrange(0, 400)]
        return start + [self.chance.randrange(200, 500) for _ in range(self.chance.randrange(16, 60))]

    def send(self, server, tokens, rank=0):
        usage = server.complete(tokens, data_parallel_rank=rank)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def compare(self, server, indexer, count, what, replicas=1):
        """The indexer must predict the prefix hit of each request."""
        for number in range(count):
            tokens, rank = self.prompt(), self.chance.randrange(replicas)
            score = indexer.score(tokens, rank)
            expected = min(score, (len(tokens) - 1) // BLOCK * BLOCK)
            found = self.send(server, tokens, rank)
            assert found == expected, f"{what}, request {number}: {found} cached, indexer: {score}"
            assert indexer.knows(tokens, 10, rank), f"{what}, request {number}: never heard of it"
            self.compared += 1
            self.cached += found

    def resume(self, server, indexer, what, rank=0):
        """After a disconnect the next batch reveals a gap in the sequence numbers, which the indexer closes by a replay."""
        for _ in range(50):
            tokens = self.prompt()
            self.send(server, tokens, rank)
            if indexer.knows(tokens, 0.5, rank):
                return
        raise AssertionError(f"{what}: the indexer did not catch up")


def run(binary, log, events, requests):
    # With a pool of 150 blocks, blocks of one document evict those of another.
    arguments = ["--num-gpu-blocks-override", "150", "--max-model-len", "512"]
    traffic = Traffic(7)
    with Server(binary, events, arguments) as server:
        proxy = Proxy(server.publish)
        indexer = Indexer(server, proxy.port, log)
        late = None
        try:
            traffic.resume(server, indexer, "start")
            traffic.compare(server, indexer, requests, "undisturbed")
            for _ in range(3):
                before = server.source()
                proxy.cut()
                time.sleep(0.3)
                for _ in range(5):
                    traffic.send(server, traffic.prompt())
                proxy.mend()
                time.sleep(0.7)
                traffic.resume(server, indexer, "gap")
                after = server.source()
                assert after["replays"] > before["replays"], f"no replay was asked for: {after}"
                traffic.compare(server, indexer, requests // 5, "after a gap")
            late = Indexer(server, server.publish, log)
            traffic.resume(server, late, "late joiner")
            traffic.compare(server, late, requests // 5, "late joiner")
            server.restart()
            traffic.resume(server, indexer, "restart")
            traffic.compare(server, indexer, requests // 5, "after a restart")
        finally:
            indexer.close()
            if late:
                late.close()
    print(f"{events or 'map'}: {traffic.compared} requests, {traffic.cached} cached tokens, all as predicted")


def run_replicas(binary, log, events, requests, replicas):
    """Each replica publishes its own cached blocks, and no others, on its own ports."""
    arguments = ["--num-gpu-blocks-override", "150", "--max-model-len", "512", "--threads", "1"]
    traffic = Traffic(8)
    with Server(binary, events, arguments, replicas) as server:
        indexer = Indexer(server, server.publish, log, replicas)
        try:
            for rank in range(replicas):
                traffic.resume(server, indexer, f"start of replica {rank}", rank)
            traffic.compare(server, indexer, requests, "replicas", replicas)
        finally:
            indexer.close()
    print(f"{replicas} replicas: {traffic.compared} requests, {traffic.cached} cached tokens, all as predicted")


def main(binary, log_path):
    with open(log_path, "w") as log:
        run(binary, log, {}, REQUESTS)
        run(binary, log, {"format": "array"}, REQUESTS // 4)
        run(binary, log, {"buffer_steps": 2}, REQUESTS // 4)
        run_replicas(binary, log, {"format": "array"}, REQUESTS // 4, REPLICAS)


if __name__ == "__main__":
    main(*sys.argv[1:])
