#!/usr/bin/env python3
"""Writes the small tokenizers of the tests of the crate `text`, and the ids that reference libraries give.

Each folder of text/src/tests/tokenizers has the tokenizer file of one kind, trained here, and `expected.json`: texts and their ids.
"""

import base64
import io
import json
import pathlib
import random
import sys
import tempfile
import unicodedata

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "clients"))

import sdk_venv  # noqa: E402

PACKAGES = ("transformers==5.23.0", "tokenizers==0.23.3", "sentencepiece==0.2.3", "protobuf==7.36.2", "tiktoken==0.14.0", "mistral-common==1.13.1",
            "gguf", "jinja2==3.1.6")
FOLDER = ROOT / "text" / "src" / "tests" / "tokenizers"
CHARACTERS = "".join(f"{a:X}\t{b}\n" for a, b in [(0x09, "20"), (0x0A, "20"), (0x3000, "20"), (0xFF21, "41"), (0xFB01, "66 69"), (0x212B, "C5"), (0xAD, "")])


def texts(lines):
    """Texts for training, and texts without special tokens for the comparison."""
    rng = random.Random(7)
    found = [lines.line(rng) for _ in range(600)]
    found = [text for text in found if len(text) < 200 and "\0" not in text and not any(special in text for special in lines.SPECIALS)]
    compared = ["", " ", "  two  spaces  ", "\n", "\t", "\u2581", *found[100:140], *[edge for edge in lines.EDGES if edge != "\0"]]
    training = [line for line in (ROOT / "README.md").read_text().splitlines() if line] + [" ".join(rng.choices(lines.WORDS, k=12)) for _ in range(200)]
    return training, compared


def write(name, files, encode, compared):
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, contents in files.items():
        (folder / file).write_bytes(contents if isinstance(contents, bytes) else json.dumps(contents).encode() + b"\n")
    rows = [[text, list(encode(text))] for text in compared]
    (folder / "expected.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def sentencepiece_models(found, compared):
    import sentencepiece
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(CHARACTERS)
        rules.flush()
        identity = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
        for name, spec in {"sentencepiece_bpe": {"model_type": "bpe", **identity},
                           "sentencepiece_unigram": {"model_type": "unigram", "normalization_rule_tsv": rules.name}}.items():
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(found), model_writer=model, vocab_size=700, num_threads=1, byte_fallback=True, character_coverage=0.98,
                hard_vocab_limit=False, minloglevel=2, control_symbols=["[INST]"],
                required_chars="<>0xA", **spec)
            reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
            write(name, {"tokenizer.model": model.getvalue(), "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}}, reference.encode, compared)


def ranked_files(found, compared):
    import references
    import tiktoken
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from tiktoken._educational import bpe_train
    pattern = references.QWEN
    ranks = bpe_train("\n".join(found), 600, pattern, visualise=None)
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    encoding = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    write("tiktoken", {"qwen.tiktoken": lines, "tokenizer_config.json": {"tokenizer_class": "QWenTokenizer"}},
          lambda text: encoding.encode(unicodedata.normalize("NFC", text)), compared)
    kimi = tiktoken.Encoding("kimi", pat_str=references.KIMI, mergeable_ranks=ranks, special_tokens={})
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": {"600": {"content": "[BOS]", "special": True}}}
    write("kimi", {"tiktoken.model": lines, "tokenizer_config.json": config}, lambda text: kimi.encode(text, disallowed_special=()), compared)
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    tekken = {"config": {"pattern": references.LLAMA3, "num_vocab_tokens": 600, "default_vocab_size": 580, "default_num_special_tokens": 10, "version": "v11"},
              "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for token, rank in ranks.items()],
              "special_tokens": special}
    write("tekken", {"tekken.json": tekken}, lambda text: [], [])
    reference = Tekkenizer.from_file(FOLDER / "tekken" / "tekken.json")
    write("tekken", {"tekken.json": tekken}, lambda text: reference.encode(text, bos=False, eos=False), compared)


def vocab_and_merges(found, compared):
    import tokenizers
    import transformers
    trainer = tokenizers.ByteLevelBPETokenizer()
    trainer.train_from_iterator(found, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_model(folder)
        files = {file: (pathlib.Path(folder) / file).read_bytes() for file in ("vocab.json", "merges.txt")}
    for name, config in {"gpt2": {"tokenizer_class": "GPT2Tokenizer"}, "qwen2": {"tokenizer_class": "Qwen2TokenizerFast"}}.items():
        write(name, {**files, "tokenizer_config.json": config}, lambda text: [], [])
        reference = transformers.AutoTokenizer.from_pretrained(FOLDER / name)
        write(name, {}, lambda text: reference.encode(text, add_special_tokens=False), compared)


def main():
    sdk_venv.enter(*PACKAGES)
    sys.path.insert(0, str(HERE))
    import lines
    found, compared = texts(lines)
    sentencepiece_models(found, compared)
    ranked_files(found, compared)
    vocab_and_merges(found, compared)


if __name__ == "__main__":
    main()
