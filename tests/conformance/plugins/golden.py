"""Golden fixtures as model folders: results of transformers in f32 for weights that a seed determines."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "tests" / "data" / "demo"
STEPS = 64


@dataclass(frozen=True)
class Golden:
    """A model folder without weights, the seed of its weights, prompts, and the greedy continuation of each prompt."""

    folder: Path
    seed: int
    prompts: list[list[int]]
    greedy: list[list[int]]


def read_golden(name: str, folder: Path) -> Golden:
    """Reads a fixture and writes its config.json to `folder`/`name`."""
    raw = (ROOT / "tests" / "data" / "golden" / f"{name}.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    about = json.loads(header["__metadata__"]["golden"])

    def integers(key: str) -> list[int]:
        begin, end = header[key]["data_offsets"]
        return list(struct.unpack_from(f"<{(end - begin) // 4}i", raw, 8 + length + begin))

    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(about["config"])
    tokens, greedy = integers("tokens"), integers("greedy")
    prompts = [tokens[:size] for size in integers("prompts")]
    return Golden(model, about["seed"], prompts, [greedy[i : i + STEPS] for i in range(0, len(greedy), STEPS)])


def questions(count: int) -> list[dict]:
    """Returns questions of the demo model: `messages` and `answer`, of all kinds in turn."""
    lines = (DEMO / "questions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:: max(len(lines) // count, 1)][:count]]
