"""Trains the byte-level BPE of the demo on its own generated text and writes the tokenizer files.

    python train_tokenizer.py        # writes tokenizer.json and tokenizer_config.json here
"""

import json
import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import generate_data

VOCAB_SIZE = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Words with one leading non-letter, single digits, punctuation, white space: the pre-tokenizer split of the Qwen family.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus(count=20_000, seed=1):
    rng = random.Random(seed)
    for _ in range(count):
        for message in rng.choice([generate_data.chat, generate_data.recall_chat])(rng):
            yield message["role"] + "\n" + message["content"]


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    ))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save("tokenizer.json", pretty=False)
    with open("tokenizer_config.json", "w") as file:
        json.dump({
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "bos_token": None, "add_bos_token": False,
            "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "clean_up_tokenization_spaces": False,
            "additional_special_tokens": SPECIAL[1:], "chat_template": CHAT_TEMPLATE,
        }, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
