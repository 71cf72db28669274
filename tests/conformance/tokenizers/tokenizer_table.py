#!/usr/bin/env python3
"""Compares the tokenizers of public packages with reference libraries; writes a table.

    tokenizer_table.py [DIFFERENCES [FOLDER]]

Model folders are made of the packages of sources.py in FOLDER/tokenizers (default target/clients). The test
`real_tokenizers_encode_and_decode_lines` of the crate `text` encodes and decodes the texts of lines.py with each of them, the libraries of
references.py do the same here. DIFFERENCES is a file for examples of all differences. The table goes to
tests/conformance/tokenizers/results/table.md. Fails if a difference is not one of KNOWN.
"""

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "clients"))

import sdk_venv  # noqa: E402

PACKAGES = ("transformers==5.23.0", "tokenizers==0.23.3", "sentencepiece==0.2.3", "protobuf==7.36.2", "tiktoken==0.14.0", "mistral-common==1.13.1",
            "gguf", "jinja2==3.1.6")
COLUMNS = {"ids": "ids", "special": "ids with BOS", "text": "texts", "visible": "texts with special tokens", "random": "texts of random ids"}
REBUILT = ("transformers 5 takes the pre-tokenizer of the class and ignores that of `tokenizer.json`. The server reads `tokenizer.json`, which was published"
           " with the model, as `tokenizers` and transformers 4 do.")
SPACES = ("transformers 5 converts the SentencePiece model with merges in the order of ids and one space less at the start. The server's ids are those of"
          " SentencePiece, with which the model was trained.")
TIES = ("Equal scores of a unigram model: runs of one character are split in another order; the `tokenizers` library, which the server uses, drops a"
        " combining character after a replaced one.")
# Differences that are decided: reason by reference library and folder.
KNOWN = {
    ("transformers", "deepseek_v3"): "`add_bos_token` is true, transformers 5 ignores it. The server adds BOS, as transformers 4 does.",
    ("transformers", "gpt4o"): REBUILT,
    ("transformers", "llama2"): REBUILT,
    **{("transformers", f"mistral_{version}"): SPACES for version in ("v1", "v2", "v3", "v3_new", "v7")},
    **{("transformers", f"tekken_{name}"): "transformers adds no BOS. The server adds BOS, as mistral-common does." for name in ("nemo", "pixtral")},
    **{("sentencepiece", f"trained_{name}"): TIES for name in ("unigram", "unigram_identity")},
    ("sentencepiece", "trained_bpe"): "The `tokenizers` library, which the server uses, drops a combining character after a replaced one.",
    ("sentencepiece", "trained_bpe_no_prefix"): "SentencePiece removes U+2581 at the start of a decoded text.",
}


def run_test(root):
    """Encodes and decodes all texts with the crate `text`."""
    command = ["cargo", "test", "-p", "text", "--test", "real_tokenizers", "--", "--ignored", "--exact", "--nocapture",
               "real_tokenizers_encode_and_decode_lines"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "HADRON_TOKENIZERS": str(root)}, check=True)


def pairs(reference, lines, results):
    """Yields (column, text, result, expected) of everything that can be compared."""
    for line, result in zip(lines, results["lines"]):
        if not reference.covers(line):
            continue
        yield "ids", line, result["ids"], reference.encode(line)
        if reference.encode_special is not None:
            yield "special", line, result["with_special"], reference.encode_special(line)
        if reference.decode is not None:
            yield "text", line, result["text"], reference.decode(result["ids"], True)
            yield "visible", line, result["visible"], reference.decode(result["ids"], False)
    for sequence in results["sequences"] if reference.random_sequences else []:
        yield "random", sequence["ids"], sequence["text"], reference.decode(sequence["ids"], True)


def compare(name, reference, lines, results, differences):
    """Returns {column: Counter}, which counts equal and different pairs."""
    counts, examples = collections.defaultdict(collections.Counter), collections.Counter()
    for column, text, result, expected in pairs(reference, lines, results):
        counts[column][list(result) == list(expected)] += 1
        if list(result) != list(expected):
            examples[column] += 1
            if examples[column] <= 5:
                first = next((i for i, (a, b) in enumerate(zip(result, expected)) if a != b), min(len(result), len(expected)))
                around = slice(max(0, first - 4), first + 12)
                differences.append(f"## {name} | {reference.name} | {column}\n{str(text)[:400]!r}\nhadron:    {result[around]!r}\nreference: {expected[around]!r}\n")
    return counts


def cell(counts):
    """Equal of all pairs."""
    return f"{counts[True]:,} of {counts.total():,}" if counts.total() else ""


def page(rows, texts, versions):
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    total = collections.Counter()
    for row in rows:
        for counts in row["counts"].values():
            total.update(counts)
    streams = sum(row["streams"][True] for row in rows if row["first"])
    all_streams = sum(row["streams"].total() for row in rows if row["first"])
    lines = [
        "# Tokenizers compared with reference libraries", "",
        f"TL;DR: {sum(row['first'] for row in rows)} tokenizers x {len(texts['lines']):,} texts: {total[True]:,} of {total.total():,} results are equal to those of the"
        f" reference libraries; {streams:,} of {all_streams:,} streams equal the whole text.", "",
        f"- Command: `just tokenizer-table`; {versions}; the commit after {revision}.",
        "- The packages are downloaded by the command and are not part of this repository.",
        "- `trained` models are made by the command with the trainer of SentencePiece; `kimi_pattern` is the vocabulary of Llama 3 with the pattern of Kimi K2.",
        "- A library that does not read special tokens in texts is compared on texts without them.",
        "- Stream: the text of the ids, detokenized one at a time, equals the text of all ids.", "",
        "| tokenizer | package | file | reference | " + " | ".join(COLUMNS.values()) + " | streams |", "|---|---|---|---|" + "---:|" * (len(COLUMNS) + 1),
        *[f"| {row['name']} | {row['origin']} | {row['file']} | {row['reference']} | " + " | ".join(cell(row["counts"][column]) for column in COLUMNS)
          + f" | {cell(row['streams']) if row['first'] else ''} |" for row in rows], "",
        "## Differences", "", "| tokenizer | reference | different | reason, and what the server does |", "|---|---|---:|---|"]
    for row in rows:
        different = sum(counts[False] for counts in row["counts"].values())
        if different:
            lines.append(f"| {row['name']} | {row['reference']} | {different:,} | {KNOWN.get((row['reference'], row['name']), 'unknown')} |")
    return "\n".join(lines + [""])


def main():
    if len(sys.argv) > 2:
        folder = pathlib.Path(sys.argv[2])
    else:
        folder = ROOT / "target" / "clients"
    sdk_venv.enter(*PACKAGES)
    sys.path.insert(0, str(HERE))
    import lines
    import references
    import sources
    import transformers
    transformers.logging.set_verbosity_error()
    root = (folder / "tokenizers").resolve()
    shutil.rmtree(root / "folders", ignore_errors=True)
    origins = sources.folders(root / "folders", root / "downloads")
    texts = {"lines": lines.lines(), "sequences": lines.random_sequences()}
    (root / "texts.json").write_text(json.dumps(texts))
    run_test(root)
    rows, differences = [], []
    for name, origin in origins.items():
        results = json.loads((root / "folders" / name / "hadron.json").read_text())
        assert "error" not in results, (name, results["error"])
        streams = collections.Counter(result["stream_equal"] for result in results["lines"] + results["sequences"])
        assert all(result["bounded"] for result in results["lines"]), f"{name}: a lower bound on the number of tokens is too high"
        for index, reference in enumerate(references.references(root / "folders" / name)):
            counts = compare(name, reference, texts["lines"], results, differences)
            print(name, reference.name, {column: dict(counts[column]) for column in COLUMNS}, flush=True)
            file = next(file for file in sources.FILES if (root / "folders" / name / file).exists())
            rows.append({"name": name, "origin": origin, "file": file, "reference": reference.name, "counts": counts, "streams": streams, "first": index == 0})
    versions = ", ".join(pin.replace("==", " ") for pin in PACKAGES[:6])
    (HERE / "results" / "table.md").write_text(page(rows, texts, versions))
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text("\n".join(differences))
    unknown = [(row["reference"], row["name"]) for row in rows
               if any(counts[False] for counts in row["counts"].values()) and (row["reference"], row["name"]) not in KNOWN]
    broken = [row["name"] for row in rows if row["streams"][False]]
    assert not unknown and not broken, f"unknown differences: {unknown}; different streams: {broken}"


main()
