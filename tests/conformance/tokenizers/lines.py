"""Texts for the comparison of tokenizers: generated from a seed, and files of this repository."""

import pathlib
import random

ROOT = pathlib.Path(__file__).resolve().parents[3]
SEED = 20261127
GENERATED = 2400
# Numbers in [0, 1) that become token ids: sequences of any tokens, whose bytes need not be valid UTF-8.
RANDOM_SEQUENCES = 400

SCRIPTS = {
    "Latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F)],
    "Greek": [(0x391, 0x3C9)],
    "Cyrillic": [(0x400, 0x45F)],
    "Hebrew": [(0x5D0, 0x5EA), (0x591, 0x5BD)],
    "Arabic": [(0x621, 0x64A), (0x64B, 0x652), (0x660, 0x669)],
    "Devanagari": [(0x905, 0x94D), (0x966, 0x96F)],
    "Bengali": [(0x985, 0x9CD)],
    "Tamil": [(0xB85, 0xBCD)],
    "Thai": [(0xE01, 0xE3A), (0xE40, 0xE4E)],
    "Georgian": [(0x10D0, 0x10FA)],
    "Ethiopic": [(0x1200, 0x1248)],
    "Khmer": [(0x1780, 0x17D2)],
    "Hiragana": [(0x3041, 0x3096)],
    "Katakana": [(0x30A1, 0x30FA)],
    "Han": [(0x4E00, 0x9FA5), (0x3400, 0x3500), (0x20000, 0x20100)],
    "Hangul": [(0xAC00, 0xD7A3), (0x1100, 0x1112)],
    "Emoji": [(0x1F300, 0x1F64F), (0x1F900, 0x1F9FF), (0x2600, 0x26FF), (0x1F1E6, 0x1F1FF)],
    "Symbols": [(0x2190, 0x22FF), (0x2500, 0x257F), (0x20A0, 0x20BF), (0xFF01, 0xFF5E)],
    "Combining": [(0x300, 0x36F), (0x1AB0, 0x1ABE)],
}
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", " \n", "\n ", "\u00a0", "\u3000", "\u2003", "\u2028", "\u0085", "\u200b",
          "\v", "\f", "\u1680", "\u202f", "\u205f", "\u180e"]
EDGES = ["\u0000", "\u0001", "\u0007", "\u001b[31m", "\u007f", "\u0080", "\u00ad", "\u200d", "\u200e", "\u202e", "\u2060", "\ufeff",
         "\ufffd", "\ufffe", "\uffff", "\ue000", "\U0010ffff", "\U000e0041", "\ufe0f", "e\u0301", "A\u030a", "\u1e9b\u0323", "\u212b",
         "\ufb01", "\u0130", "\u00df", "\u01c5", "\u2167", "\u00b2", "\u2460", "\u0e33", "\uac00\u11a8", "\U0001f469\u200d\U0001f469\u200d\U0001f466",
         "\u2581", "\u2581\u2581", "\u0120", "\u010a", "\u00e9", "<0x0A>", "<0x", "0x0A>", "##ing", "</w>", "\u00c4", "\u0144"]
SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<|endoftext|>",
            "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>",
            "</tool_call>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "<|channel|>", "<|return|>", "<EOT>", "[TOOL_CALLS]", "[BOS]", "<|fim_prefix|>",
            "<| im_start |>", "<|im_start", "im_end|>", "<S>", "< s >", "<unk"]
WORDS = ("the of and to in that it is was for on are as with his they at be this from have or by one had not but what all were when we there can "
         "an your which their said if do will each about how up out them then she many some so these would other into has more her two like him "
         "internationalization supercalifragilistic don't I'm we've it'll you're he'd THE Don'T WE'VE naïve café Straße Ångström "
         "Привет мир это тест Γειά σου κόσμε 你好 世界 こんにちは 안녕하세요 مرحبا שלום नमस्ते สวัสดี").split()
CODE = ["fn main() {\n    println!(\"{}\", 1 << 7);\n}", "def f(x: int) -> int:\n\treturn x**2 # ok", "<div class=\"a\">&nbsp;</div>", "SELECT * FROM t WHERE a != 'b';",
        "{\"a\": [1, 2.5e-7, null], \"b\": \"\\u00e9\\n\"}", "for (i = 0; i < 10; ++i) { a[i] += b->c; }", "$x = @{ 'k' => \\%h };", "#include <stdio.h>\r\n",
        "https://example.org/a/b?c=d&e=%20#f", "C:\\Users\\x\\y.txt", "a@b.co", "```python\nprint('x')\n```", "| a | b |\n|---|---|", "\\frac{a}{b}_{i}^2", "// TODO: ///// fix"]


def word(rng):
    name = rng.choice(list(SCRIPTS))
    return "".join(chr(rng.randint(*rng.choice(SCRIPTS[name]))) for _ in range(rng.randint(1, 9)))


def number(rng):
    return rng.choice([str(rng.randint(0, 10 ** rng.randint(1, 20))), f"{rng.uniform(-1e6, 1e6):,.3f}", f"{rng.random():e}", hex(rng.getrandbits(64)), "٣٤٥", "१२३", "½", "12:34:56"])


def space(rng):
    return rng.choice(SPACES) if rng.random() < 0.8 else rng.choice([" ", "\n", "\t", "\u2581"]) * rng.randint(1, 40)


PIECES = [(30, lambda rng: rng.choice(WORDS)), (12, word), (8, number), (12, space), (6, lambda rng: rng.choice(EDGES)), (6, lambda rng: rng.choice(SPECIALS)),
          (5, lambda rng: rng.choice(CODE)), (6, lambda rng: rng.choice("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") * rng.randint(1, 5)),
          (1, lambda rng: rng.choice("ab0 .=-*~あ啊") * rng.randint(20, 200))]


def line(rng):
    weights = [weight for weight, _ in PIECES]
    pieces = [make(rng) for _, make in rng.choices(PIECES, weights, k=rng.randint(1, 24))]
    return rng.choice(["", " "]).join(pieces)


def files():
    """Lines and whole texts of files of this repository."""
    names = ["README.md", "ARCHITECTURE.md", "docs/structured-output.md", "text/src/jinja/unicode.rs", "tests/conformance/templates/table.py"]
    texts = [(ROOT / name).read_text() for name in names]
    return [line for text in texts for line in text.splitlines(True) if line.strip()] + texts


def lines():
    """All texts: at least 2,000, the last ones longer than the window of the server's tokenizer."""
    rng = random.Random(SEED)
    generated = [line(rng) for _ in range(GENERATED)]
    edges = ["", " ", "  ", "\n", *SPACES, *EDGES, *SPECIALS, *WORDS, *[f"a{space}b" for space in SPACES]]
    plain = [text for text in generated if not any(special in text for special in SPECIALS)]
    return edges + generated + files() + ["".join(generated[:900]), " ".join(plain[:900])]


def random_sequences():
    rng = random.Random(SEED + 1)
    return [[rng.random() for _ in range(rng.randint(1, 40))] for _ in range(RANDOM_SEQUENCES)]
