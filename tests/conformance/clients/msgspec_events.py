"""Reads Hadron's KV events with vLLM's classes: msgspec_events.py BINARY KV_EVENTS.PY"""

import atexit
import importlib.util
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types

import msgspec
import zmq

from kv_server import Server

EVENTS = 100_000
CLIENTS = 4
END = b"\xff" * 8


def vllm_module(path):
    """Loads vLLM's module of event classes from its file; its imports of other vLLM modules are replaced by stubs."""

    def stub(name, **members):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(members)

    nothing = lambda *_, **__: None
    stub("vllm.config.kv_events", KVEventsConfig=object)
    stub("vllm.logger", init_logger=nothing)
    stub(
        "vllm.utils.network_utils",
        get_ip=nothing,
        get_tcp_uri=nothing,
        is_valid_ipv6_address=nothing,
        split_zmq_path=nothing,
    )
    stub("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    spec = importlib.util.spec_from_file_location("vllm_kv_events", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_kv_events"] = module
    spec.loader.exec_module(module)
    return module


def tiny_model(binary):
    """Writes a checkpoint with random weights; returns its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    with open(f"{folder}/config.json", "w") as file:
        json.dump(config, file)
    subprocess.run([binary, "synth", folder, f"{folder}/model"], check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/model"


def load(server, stop, seed):
    """Random prompts with shared prefixes, so that blocks are stored, hit and evicted."""
    chance = random.Random(seed)
    while not stop.is_set():
        tokens = [chance.randrange(3) + 300 for _ in range(chance.randrange(4, 60))]
        salt = {"cache_salt": f"tenant-{chance.randrange(3)}"} if chance.random() < 0.3 else {}
        server.complete(tokens, n=16, max_tokens=200, temperature=1.5, **salt)


class Reader:
    """Yields the batches in the order received; fails at a gap in the sequence numbers."""

    def __init__(self, server, module):
        self.decoder = msgspec.msgpack.Decoder(module.KVEventBatch)
        self.encoder = msgspec.msgpack.Encoder()
        self.batches, self.events, self.kinds, self.last = {}, 0, {}, None
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.subscribe(b"")
        self.socket.connect(server.events["endpoint"])

    def read(self, timeout_ms):
        if not self.socket.poll(timeout_ms):
            return False
        frames = self.socket.recv_multipart()
        assert len(frames) == 3 and len(frames[1]) == 8, [len(frame) for frame in frames]
        assert frames[0] == b"kv@here@demo", frames[0]
        seq = int.from_bytes(frames[1], "big")
        assert self.last in (None, seq - 1), f"{seq} after {self.last}"
        self.batches[seq], self.last = frames[2], seq
        self.check(seq, frames[2])
        return True

    def check(self, seq, payload):
        batch = self.decoder.decode(payload)
        again = self.encoder.encode(batch)
        assert again == payload, f"batch {seq}:\nours   {payload.hex()}\nvLLM's {again.hex()}"
        assert abs(batch.ts - time.time()) < 3600 and batch.data_parallel_rank == 0
        self.events += len(batch.events)
        for event in batch.events:
            kind = type(event).__name__
            self.kinds[kind] = self.kinds.get(kind, 0) + 1


def replay(server, start):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.connect(server.events["replay_endpoint"])
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    batches = {}
    while dealer.poll(30_000):
        delimiter, _, seq, payload = dealer.recv_multipart()
        assert delimiter == b""
        if seq == END:
            assert payload == b""
            dealer.close()
            return batches
        batches[int.from_bytes(seq, "big")] = payload
    raise AssertionError("the replay did not end")


def main(binary, path):
    module = vllm_module(path)
    # A tiny model, small blocks and a small pool give many events per second.
    arguments = [tiny_model(binary), "--block-size", "2", "--num-gpu-blocks-override", "8000"]
    config = {"topic": "kv@here@demo", "buffer_steps": 1_000_000}
    with Server(binary, config, arguments) as server:
        reader = Reader(server, module)
        time.sleep(0.5)
        stop, begun = threading.Event(), time.time()
        clients = [threading.Thread(target=load, args=(server, stop, seed)) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            while reader.events < EVENTS:
                assert reader.read(60_000), "no event for a minute"
        finally:
            stop.set()
        for client in clients:
            client.join()
        while reader.read(1_000):
            pass
        source = server.source()
        assert source["last_seq"] == reader.last, source
        again = replay(server, source["epoch"])
        assert min(again) == source["epoch"]
        first = reader.decoder.decode(again[source["epoch"]])
        assert [type(event).__name__ for event in first.events] == ["AllBlocksCleared"], first
        assert all(again[seq] == payload for seq, payload in reader.batches.items())
        assert set(again) == set(range(source["epoch"], source["last_seq"] + 1))
        took = time.time() - begun

        server.restart()
        anew = server.source()
        assert anew["epoch"] > source["last_seq"], (anew, source)
        first = reader.decoder.decode(replay(server, 0)[anew["epoch"]])
        assert [type(event).__name__ for event in first.events] == ["AllBlocksCleared"], first
    print(f"{reader.events} events in {len(reader.batches)} batches, {took:.0f} s: {reader.kinds}")
    print("vLLM 0.33.0's classes decode them and encode the same bytes; replayed alike; restart seen")


if __name__ == "__main__":
    main(*sys.argv[1:])
