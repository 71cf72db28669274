//! Generates the request bodies of a load before the measurement starts.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use protocol::Token;
use serde_json::{Value, json};

use super::rng::SplitMix64;
use crate::config::{BenchServeArgs, BenchServeEndpoint, PromptKind};
use text::Tokenizer;

/// Smallest random token id. Special tokens and single bytes usually have smaller ids.
const RANDOM_ID_MIN: u32 = 100;

/// Vocabulary size if neither flags nor tokenizer nor server provide it. It is smaller than the vocabulary of
/// any common tokenizer.
const VOCAB_SIZE_FALLBACK: u32 = 500;

/// Stream number of the random number generator for the prefix that all requests share.
const SHARED_PREFIX_STREAM: u64 = u64::MAX;

/// Generates the prompts and request bodies of one load.
pub(super) struct PromptGenerator<'a> {
    args: &'a BenchServeArgs,
    model: String,
    tokenizer: Option<Tokenizer>,
    id_min: u32,
    id_max: u32,
    shared: Vec<Token>,
}

impl<'a> PromptGenerator<'a> {
    /// Creates a generator. `card` is the server's model card. If it contains the path of a local model
    /// folder, the vocabulary size is read from this folder.
    pub(super) fn new(args: &'a BenchServeArgs, model: String, card: &Value) -> Result<Self> {
        if args.endpoint == BenchServeEndpoint::Chat && args.prompts == PromptKind::Ids {
            bail!("--endpoint chat takes text: add --prompts text");
        }
        if args.input_len == 0 || args.output_len == 0 {
            bail!("--input-len and --output-len: at least 1");
        }
        if args.shared_prefix > args.input_len {
            let (shared, input) = (args.shared_prefix, args.input_len);
            bail!("--shared-prefix {shared} exceeds --input-len {input}");
        }
        let tokenizer = match &args.tokenizer {
            Some(dir) => Some(Tokenizer::load(dir).context("--tokenizer")?),
            None => None,
        };
        let tokenizer_vocab_size = tokenizer.as_ref().map(|t| t.vocab_size() as u32);
        let id_max = args
            .vocab_size
            .or(tokenizer_vocab_size)
            .or_else(|| vocab_size(card))
            .unwrap_or(VOCAB_SIZE_FALLBACK);
        let id_min = RANDOM_ID_MIN.min(id_max / 2);
        let mut rng = SplitMix64::new(args.seed, SHARED_PREFIX_STREAM);
        let shared = (0..args.shared_prefix).map(|_| rng.uniform(id_min, id_max)).collect();
        Ok(Self { args, model, tokenizer, id_min, id_max, shared })
    }

    /// Returns the URL path to which the requests are sent.
    pub(super) fn path(&self) -> &'static str {
        match self.args.endpoint {
            BenchServeEndpoint::Completions => "/v1/completions",
            BenchServeEndpoint::Chat => "/v1/chat/completions",
        }
    }

    /// Returns the body of request `index` at a concurrency level.
    pub(super) fn body(&self, level: usize, index: usize) -> Bytes {
        let mut rng = SplitMix64::new(self.args.seed, (level as u64) << 32 | index as u64);
        let mut ids = self.shared.clone();
        let rest = self.args.input_len - ids.len();
        ids.extend((0..rest).map(|_| rng.uniform(self.id_min, self.id_max)));
        let mut body = json!({
            "model": self.model,
            "max_tokens": self.args.output_len,
            "temperature": 0.0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "ignore_eos": !self.args.stop_at_eos,
        });
        match (self.args.endpoint, self.args.prompts) {
            (BenchServeEndpoint::Completions, PromptKind::Ids) => body["prompt"] = ids.into(),
            (BenchServeEndpoint::Completions, PromptKind::Text) => {
                body["prompt"] = self.text(&ids).into();
            }
            (BenchServeEndpoint::Chat, _) => {
                body["messages"] = json!([{"role": "user", "content": self.text(&ids)}]);
            }
        }
        body.to_string().into()
    }

    /// Decodes token ids to a text that has about `ids.len()` tokens. The number is exact if encoding the
    /// decoded text gives the same ids.
    fn text(&self, ids: &[Token]) -> String {
        let Some(tokenizer) = &self.tokenizer else {
            let words: Vec<String> = ids.iter().map(|id| format!("w{id}")).collect();
            return words.join(" ");
        };
        let mut text = tokenizer.decode(ids, true);
        // The decoded text may have another number of tokens, because characters can be incomplete and
        // adjacent tokens can merge. It is then truncated or extended, up to eight times.
        for round in 0..8 {
            let Ok(mut encoded) = tokenizer.encode(&text, false) else { break };
            if encoded.len() == ids.len() {
                break;
            }
            encoded.truncate(ids.len());
            let missing = ids.len() - encoded.len();
            encoded.extend(ids.iter().cycle().skip(round).take(missing));
            text = tokenizer.decode(&encoded, true);
        }
        text
    }
}

/// Returns the vocabulary size from the model folder in the card, if this folder exists on this machine.
fn vocab_size(card: &Value) -> Option<u32> {
    let path = Path::new(card["root"].as_str()?).join("config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    u32::try_from(config["vocab_size"].as_u64()?).ok()
}
