//! Tokenizer of synthetic checkpoints: every id decodes to a text that is encoded as this id.
//!
//! Ids 0–255 are the bytes. The next ids are the special tokens of the model family; all further ids up to
//! the vocabulary size are tokens `<|t{id}|>`. A pre-tokenizer pattern isolates the `<|t{id}|>` texts; they
//! are not added tokens, because tokenizer libraries take seconds to load a large number of added tokens.
//! `tokenizer.json` is written as plain JSON, without a tokenizer library.

use crate::config::SynthTokenizerKind;
use crate::{ModelArchitecture, ModelConfig};
use serde_json::{Map, Value, json};

const CHATML: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    template: CHATML_TEMPLATE,
    bos: None,
    eos: &["<|im_end|>", "<|endoftext|>"],
};
const LLAMA3: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &[
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    template: LLAMA3_TEMPLATE,
    bos: Some("<|begin_of_text|>"),
    eos: &["<|eot_id|>", "<|end_of_text|>"],
};
const PHI: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    template: PHI_TEMPLATE,
    bos: None,
    eos: &["<|end|>", "<|endoftext|>"],
};
const MISTRAL: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<s>", "</s>", "[INST]", "[/INST]"],
    template: MISTRAL_TEMPLATE,
    bos: Some("<s>"),
    eos: &["</s>"],
};

const GEMMA: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    template: GEMMA_TEMPLATE,
    bos: Some("<bos>"),
    eos: &["<end_of_turn>", "<eos>"],
};

const HARMONY: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &[
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ],
    template: HARMONY_TEMPLATE,
    bos: Some("<|startoftext|>"),
    eos: &["<|return|>", "<|endoftext|>", "<|call|>"],
};

const HARMONY_TEMPLATE: &str = "{% for message in messages %}\
{{ '<|start|>' + message['role'] }}\
{% if message['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}\
{{ '<|message|>' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}";

const CHATML_TEMPLATE: &str = "{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const LLAMA3_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] }}\
{{ '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";
const PHI_TEMPLATE: &str = "{% for message in messages %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";
const MISTRAL_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ '[INST]' + message['content'] + '[/INST]' }}{% endif %}{% endfor %}";

const GEMMA_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

const GEMMA4: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<bos>", "<eos>", "<|turn>", "<turn|>"],
    template: GEMMA4_TEMPLATE,
    bos: Some("<bos>"),
    eos: &["<turn|>", "<eos>"],
};
const GEMMA4_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<|turn>' + role + '\n' + message['content'] + '<turn|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}";

const GLM: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"],
    template: GLM_TEMPLATE,
    bos: None,
    eos: &["<|user|>", "<|endoftext|>"],
};
const GLM_TEMPLATE: &str = "[gMASK]<sop>{% for message in messages %}\
{{ '<|' + message['role'] + '|>\n' + message['content'] }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

const DEEPSEEK: SynthTokenizerSpec = SynthTokenizerSpec {
    special: &["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    template: DEEPSEEK_TEMPLATE,
    bos: Some("<｜begin▁of▁sentence｜>"),
    eos: &["<｜end▁of▁sentence｜>"],
};
const DEEPSEEK_TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}\
{% elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}\
{% else %}{{ message['content'] }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}";

/// Special tokens and chat template of a model family; the first special token has id 256.
pub(super) struct SynthTokenizerSpec {
    special: &'static [&'static str],
    template: &'static str,
    bos: Option<&'static str>,
    /// EOS tokens, which end a text or a chat turn; their ids are written to `generation_config.json`.
    eos: &'static [&'static str],
}

const BYTES: usize = 256;

impl SynthTokenizerSpec {
    pub(super) const fn of(architecture: ModelArchitecture) -> &'static Self {
        match architecture.traits().synth_tokenizer {
            SynthTokenizerKind::ChatMl => &CHATML,
            SynthTokenizerKind::Llama3 => &LLAMA3,
            SynthTokenizerKind::Mistral => &MISTRAL,
            SynthTokenizerKind::Phi => &PHI,
            SynthTokenizerKind::Gemma => &GEMMA,
            SynthTokenizerKind::Gemma4 => &GEMMA4,
            SynthTokenizerKind::Glm => &GLM,
            SynthTokenizerKind::Harmony => &HARMONY,
            SynthTokenizerKind::Deepseek => &DEEPSEEK,
        }
    }

    /// Smallest vocabulary size with ids for all bytes and special tokens.
    pub(super) fn min_vocab(&self) -> usize {
        BYTES + self.special.len()
    }

    fn id(&self, token: &str) -> Option<usize> {
        self.special.iter().position(|s| *s == token).map(|i| BYTES + i)
    }

    /// Content of `tokenizer.json`: byte-level BPE without merges.
    pub(super) fn tokenizer(&self, config: &ModelConfig) -> Value {
        // The special tokens are also in the vocabulary, because libraries assign new ids to added tokens
        // that are not in the vocabulary.
        let special = self.special.iter().map(|text| (*text).to_owned());
        let fillers = (self.min_vocab()..config.vocab).map(|id| format!("<|t{id}|>"));
        let texts = byte_alphabet().into_iter().map(String::from).chain(special).chain(fillers);
        let vocab: Map<String, Value> =
            texts.enumerate().map(|(id, text)| (text, json!(id))).collect();
        let special = |(at, content): (usize, &&str)| {
            json!({"id": BYTES + at, "content": content, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        };
        let added: Vec<Value> = self.special.iter().enumerate().map(special).collect();
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false});
        let split = json!({"type": "Split", "pattern": {"Regex": r"<\|t[0-9]+\|>"},
            "behavior": "Isolated", "invert": false});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": null, "decoder": byte_level,
            // `ignore_merges` encodes a pre-token that is in the vocabulary as one token.
            "model": {"type": "BPE", "dropout": null, "unk_token": null,
                "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                "vocab": vocab, "merges": []}
        })
    }

    /// Content of `tokenizer_config.json`.
    pub(super) fn tokenizer_config(&self, config: &ModelConfig) -> Value {
        json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions,
            "bos_token": self.bos, "eos_token": self.eos[0], "chat_template": self.template,
            "clean_up_tokenization_spaces": false, "add_bos_token": false
        })
    }

    /// Content of `generation_config.json`.
    pub(super) fn generation_config(&self) -> Value {
        let eos: Vec<_> = self.eos.iter().filter_map(|t| self.id(t)).collect();
        let mut value = json!({"eos_token_id": eos, "do_sample": false});
        if let Some(bos) = self.bos.and_then(|t| self.id(t)) {
            value["bos_token_id"] = json!(bos);
        }
        value
    }
}

/// Printable character that represents each byte in byte-level BPE.
fn byte_alphabet() -> [char; BYTES] {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    std::array::from_fn(|b| {
        let byte = b as u8;
        if printable(byte) {
            return char::from(byte);
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight_table::tests::tiny;

    #[test]
    fn ids_have_unique_texts() {
        let config = tiny("Qwen3ForCausalLM");
        let tokenizer = SynthTokenizerSpec::of(config.architecture).tokenizer(&config);
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        let added = tokenizer["added_tokens"].as_array().unwrap();
        assert_eq!((vocab.len(), added.len()), (272, 3));
        assert_eq!(vocab["A"], 65);
        assert_eq!(vocab["Ġ"], 32);
        assert_eq!(vocab["<|t271|>"], 271);
        for token in added {
            assert_eq!(vocab[token["content"].as_str().unwrap()], token["id"]);
        }
        let mut ids: Vec<_> = vocab.values().map(|id| id.as_u64().unwrap()).collect();
        ids.sort_unstable();
        assert_eq!(ids, (0..272).collect::<Vec<_>>());
    }

    #[test]
    fn eos_tokens_have_ids() {
        let llama = SynthTokenizerSpec::of(ModelArchitecture::Llama).generation_config();
        assert_eq!(
            (&llama["eos_token_id"], &llama["bos_token_id"]),
            (&json!([260, 257]), &json!(256))
        );
    }
}
