#!/usr/bin/env python3
"""Measures models with synthetic weights on this machine's GPU, one server per case:

    families.py BUILD OUT CASE...

BUILD is a folder that `tests/bench/speed/build.sh` has written. A case is `MODEL [FLAG...] @ LOAD...`: a folder of
`shapes.py`, further flags of `hadron serve`, and loads `CONCURRENCY/INPUT/OUTPUT[/PROMPTS]`, in tokens. OUT gets one JSON
line per load. A server that ends is reported, and the next case begins.

    families.py target/speed/new out.jsonl "qwen3.5-35b-a3b-fp8 --max-num-seqs 512 @ 1/1024/256 512/1024/128/1024"
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "speed"))
import turns  # noqa: E402


def measure(build, case, folder, out):
    serve, loads = case.split("@")
    model, *flags = serve.split()
    server = turns.Server(
        build,
        [folder / "shapes" / model, "--served-model-name", model, "--load-format", "synth", "--device", "cuda",
         "--no-enable-prefix-caching", *flags],
        folder / "log",
    )  # fmt: skip
    about = json.loads((build / "about.json").read_text()) | {"model": model, "flags": flags, "ready_s": round(server.ready_s, 1)}
    ids = min(100_000, json.loads((folder / "shapes" / model / "config.json").read_text())["vocab_size"])
    for load in loads.split():
        level, length, output, *prompts = load.split("/")
        count = prompts[0] if prompts else str(max(6, 2 * int(level)))
        (found,) = turns.load(
            build, server, folder, "--input-len", length, "--output-len", output, "--vocab-size", str(ids),
            "--concurrency", level, "--num-prompts", count, "--warmup", "1",
        )  # fmt: skip
        line = json.dumps(about | {"load": load} | found)
        print(line, flush=True)
        with out.open("a") as lines:
            lines.write(line + "\n")
    server.stop()


def main():
    build, out, *cases = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ.setdefault("XDG_CACHE_HOME", str(folder / "cache"))
        subprocess.run([sys.executable, HERE / "shapes.py", folder / "shapes"], check=True)
        for case in cases:
            try:
                measure(pathlib.Path(build).resolve(), case, folder, pathlib.Path(out))
            except SystemExit as error:
                print(f"{case}: {error}", file=sys.stderr, flush=True)
                subprocess.run(["pkill", "-x", "hadron"], check=False)


if __name__ == "__main__":
    main()
