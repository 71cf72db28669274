"""Writes a model folder whose outputs are fixed: the chat template selects a script, and the model generates its text.

Each script is a sequence of pieces of text. Every piece is one token, and the only successor of a piece is the next one: the embedding of a
token is a basis vector, attention and MLP add nothing, and row `next` of the output matrix is the basis vector of its predecessor. Agents
that call tools can thus be run end to end without a trained model.

    puppet_model.py FOLDER
"""

import json
import pathlib
import struct
import sys

# Scripts by the name of the tool that they call: the first tool of a request that is listed here is called once.
CALLS = {
    "Bash": {"command": "echo puppet-was-here", "description": "Print a word"},
    "bash": {"command": "echo puppet-was-here", "description": "Print a word"},
    "exec_command": {"cmd": "echo puppet-was-here"},
    "shell_command": {"command": "echo puppet-was-here"},
    "shell": {"command": ["echo", "puppet-was-here"]},
    "get_weather": {"city": "Paris"},
}
# Script of a request without one of these tools, and of a request that has the result of a call.
TEXT = "The puppet has no tool to call."
FINAL = "The puppet read the result of its call."
PIECE_CHARS = 12
CONTENT_CHARS = 200


def call_text(name: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": CALLS[name]}) + "\n</tool_call>"


def pieces(text: str, used: set[str]) -> list[str]:
    """Cuts a text into pieces that no other script contains."""
    out, start = [], 0
    while start < len(text):
        end = min(len(text), start + PIECE_CHARS)
        while text[start:end] in used and end < len(text):
            end += 1
        if text[start:end] in used:
            # The last piece exists already: it is joined to the piece before it.
            start = start - len(out[-1])
            used.discard(out.pop())
            end = len(text)
        out.append(text[start:end])
        used.add(text[start:end])
        start = end
    return out


def letter(byte: int) -> str:
    """Character of GPT-2's byte alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(0x100 + sum(1 for b in range(byte) if b not in printable))


def template(triggers: dict[str, str]) -> str:
    calls = "".join(
        f"{{%- if {json.dumps(name)} in names and not ns.trigger -%}}{{%- set ns.trigger = {json.dumps(triggers[name])} -%}}{{%- endif -%}}"
        for name in CALLS
    )
    return (
        "{%- set ns = namespace(results=false, trigger='') -%}"
        "{%- for message in messages -%}"
        "{%- if message.role == 'tool' -%}{%- set ns.results = true -%}{%- endif -%}"
        "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '')[:" + str(CONTENT_CHARS) + "] + '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "{%- set names = [] if not tools else tools | map(attribute='function') | map(attribute='name') | list -%}"
        f"{calls}"
        f"{{%- if ns.results -%}}{{%- set ns.trigger = {json.dumps(triggers['final'])} -%}}{{%- endif -%}}"
        f"{{%- if not ns.trigger -%}}{{%- set ns.trigger = {json.dumps(triggers['text'])} -%}}{{%- endif -%}}"
        "{{- '<|im_start|>assistant\\n' + ns.trigger -}}"
        "{%- endif -%}"
    )


def safetensors(tensors: dict[str, tuple[list[int], bytes]]) -> bytes:
    header, body = {}, bytearray()
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def zeros(*shape: int) -> tuple[list[int], bytes]:
    count = 1
    for size in shape:
        count *= size
    return list(shape), bytes(4 * count)


def ones(size: int) -> tuple[list[int], bytes]:
    return [size], struct.pack(f"<{size}f", *([1.0] * size))


def rows(count: int, width: int, places: dict[int, dict[int, float]]) -> tuple[list[int], bytes]:
    """Matrix with the given values: row, then column."""
    data = bytearray(4 * count * width)
    for row, columns in places.items():
        for column, value in columns.items():
            struct.pack_into("<f", data, 4 * (row * width + column), value)
    return [count, width], bytes(data)


def write(folder: pathlib.Path) -> None:
    scripts = {name: call_text(name) for name in CALLS} | {"text": TEXT, "final": FINAL}
    triggers = {name: f"<|puppet_{index}|>" for index, name in enumerate(scripts)}
    used = {letter(byte) for byte in range(256)}  # tokens of single bytes
    parts = {name: pieces(text, used) for name, text in scripts.items()}
    special = ["<|im_start|>", "<|im_end|>", *triggers.values()]
    added = special + [piece for script in parts.values() for piece in script]
    ids = {content: 256 + index for index, content in enumerate(added)}
    end, vocab = ids["<|im_end|>"], 256 + len(added)
    basis = {ids[content]: 1 + index for index, content in enumerate(added[2:])}
    hidden = -(-(1 + len(basis)) // 64) * 64

    embeddings = {token: {basis.get(token, 0): 1.0} for token in range(vocab)}
    outputs: dict[int, dict[int, float]] = {end: {0: 8.0}}
    for name, script in parts.items():
        sequence = [ids[triggers[name]], *(ids[piece] for piece in script), end]
        for token, successor in zip(sequence, sequence[1:]):
            outputs.setdefault(successor, {})[basis[token]] = 8.0
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": rows(vocab, hidden, embeddings),
        "lm_head.weight": rows(vocab, hidden, outputs),
        "model.norm.weight": ones(hidden),
        layer + "input_layernorm.weight": ones(hidden),
        layer + "post_attention_layernorm.weight": ones(hidden),
        layer + "self_attn.q_proj.weight": zeros(64, hidden),
        layer + "self_attn.k_proj.weight": zeros(16, hidden),
        layer + "self_attn.v_proj.weight": zeros(16, hidden),
        layer + "self_attn.o_proj.weight": zeros(hidden, 64),
        layer + "mlp.gate_proj.weight": zeros(16, hidden),
        layer + "mlp.up_proj.weight": zeros(16, hidden),
        layer + "mlp.down_proj.weight": zeros(hidden, 16),
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": end, "dtype": "float32",
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": ids[content], "content": content, **flags, "special": content in special} for content in added],
        "pre_tokenizer": byte_level, "post_processor": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {letter(byte): byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template(triggers)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
