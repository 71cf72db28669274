"""Reference tokenizers: the `tokenizers` library, transformers, SentencePiece, tiktoken and mistral-common.

A reference has `encode(text)` and may have `encode_special(text)` (with the tokens around a text), `decode(ids, skip_special_tokens)`
and `covers(text)`, which says whether it reads the special tokens in this text as a model folder does.
"""

import base64
import functools
import json
import warnings


class Reference:
    encode_special = None
    decode = None
    random_sequences = False

    def covers(self, text):
        return True


class TokenizersLibrary(Reference):
    name, random_sequences = "tokenizers", True

    def __init__(self, folder):
        import tokenizers
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.encode = lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids
        self.decode = lambda ids, skip: self.tokenizer.decode(ids, skip_special_tokens=skip)


class Transformers(Reference):
    name, random_sequences = "transformers", True

    def __init__(self, folder):
        import transformers
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        except Exception:
            if not (folder / "tokenizer.json").exists():
                raise
            self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.tokenizer.model_max_length = 10 ** 9
        self.encode = lambda text: self.tokenizer.encode(text, add_special_tokens=False)
        self.encode_special = lambda text: self.tokenizer.encode(text, add_special_tokens=True)
        self.decode = lambda ids, skip: self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


class SentencePiece(Reference):
    name = "sentencepiece"

    def __init__(self, folder):
        import sentencepiece
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        ids = range(self.model.get_piece_size())
        from sentencepiece import sentencepiece_model_pb2
        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString((folder / "tokenizer.model").read_bytes())
        self.special = [proto.pieces[id].piece for id in ids if proto.pieces[id].type in (2, 3, 4)]
        self.encode = self.model.encode
        self.decode = lambda ids, skip: self.model.decode(ids)

    def covers(self, text):
        return not any(special in text for special in self.special)


class Tiktoken(Reference):
    name = "tiktoken"

    def __init__(self, path, pattern, special, normalize=lambda text: text):
        import tiktoken
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in path.read_bytes().splitlines() if line)}
        special = {token: len(ranks) + index for index, token in enumerate(special(len(ranks)))}
        encoding = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.encode = lambda text: encoding.encode(normalize(text), allowed_special="all")
        self.decode = lambda ids, skip: encoding.decode([id for id in ids if not skip or id < len(ranks)])


class MistralCommon(Reference):
    name = "mistral-common"

    def __init__(self, folder):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        self.model = Tekkenizer.from_file(folder / "tekken.json")
        self.special = [token["token_str"] for token in self.model._all_special_tokens]
        self.encode = functools.partial(self.model.encode, bos=False, eos=False)
        self.encode_special = functools.partial(self.model.encode, bos=True, eos=False)
        self.decode = lambda ids, skip: self.model.decode(ids)

    def covers(self, text):
        return not any(special in text for special in self.special)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
KIMI = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>",
                  "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"]


def references(folder):
    """The references of a model folder."""
    import unicodedata
    if (folder / "tokenizer.json").exists():
        return [TokenizersLibrary(folder), Transformers(folder)]
    if folder.name == "llama3_tiktoken":
        special = LLAMA3_SPECIAL + [f"<|reserved_special_token_{index}|>" for index in range(2, 246)]
        return [Tiktoken(folder / "tokenizer.model", LLAMA3, lambda first: special)]
    if folder.name == "kimi_pattern":
        return [Tiktoken(folder / "tiktoken.model", KIMI, lambda first: ["[BOS]"] + [f"<|reserved_token_{id}|>" for id in range(first + 1, first + 256)])]
    if folder.name == "qwen_tiktoken":
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{index}|>" for index in range(205)]
        return [Tiktoken(folder / "qwen.tiktoken", QWEN, lambda first: special, functools.partial(unicodedata.normalize, "NFC"))]
    if (folder / "tekken.json").exists():
        return [MistralCommon(folder), Transformers(folder)]
    if folder.name.startswith("trained_"):
        return [SentencePiece(folder)]
    if (folder / "tokenizer.model").exists():
        legacy = json.loads((folder / "tokenizer_config.json").read_text()).get("legacy", True)
        return [SentencePiece(folder), Transformers(folder)] if legacy else [Transformers(folder)]
    return [Transformers(folder)]
