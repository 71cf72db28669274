//! Reads golden fixtures: safetensors files with reference results for a small model. Their metadata contains
//! the model's configuration and the seed of its weights.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Results that HF transformers computed for one model configuration and one seed of the weights.
pub(crate) struct GoldenFixture {
    /// Text of the model's `config.json`.
    pub(crate) config: String,
    pub(crate) seed: u64,
    pub(crate) bf16_gate: FixtureTolerance,
    /// Tolerance that replaces `bf16_gate` on GPUs, where fp8 GEMMs also quantise their activations; `None`
    /// for models without fp8 weights.
    pub(crate) fp8_gate: Option<FixtureTolerance>,
    pub(crate) tokens: Vec<i32>,
    /// Logits of all tokens: `[tokens, vocab_size]`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Hidden states after each layer at the last few positions: `[layers, positions, hidden_size]`.
    pub(crate) hidden: Vec<Vec<Vec<f32>>>,
    /// Ids of the experts to which each token is routed, in ascending order: `[MoE layers, tokens, experts
    /// per token]`.
    pub(crate) routes: Vec<Vec<Vec<i32>>>,
    /// Lengths of the prompts; each prompt is a prefix of `tokens`.
    pub(crate) prompts: Vec<usize>,
    /// Output tokens of greedy decoding for each prompt.
    pub(crate) greedy: Vec<Vec<i32>>,
    /// For each token except the first, the draft token to which the MTP module gives the largest logit;
    /// empty for models without an MTP module.
    pub(crate) draft_tokens: Vec<i32>,
    /// Logits of the MTP module for the last few of `draft_tokens`: `[positions, vocab_size]`.
    pub(crate) draft_logits: Vec<Vec<f32>>,
    /// Chains of draft tokens. Each draft token of a chain is computed from the
    /// module's output for the previous draft token.
    pub(crate) draft_chains: Vec<DraftChain>,
}

/// Tolerance for the results of one fixture in 16-bit types. The fixture file states the reason for the
/// tolerance.
#[derive(Clone, Copy)]
pub(crate) struct FixtureTolerance {
    /// Factor by which the common maximum errors (`BF16_GATE`) are multiplied.
    pub(crate) scale: f32,
    /// Minimum fraction of positions at which the router must select the same experts as in f32.
    pub(crate) same_experts: f64,
}

impl FixtureTolerance {
    fn read(about: &Value) -> Option<Self> {
        let scale = about["scale"].as_f64()? as f32;
        Some(Self { scale, same_experts: about["same_experts"].as_f64().unwrap_or(0.75) })
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden")
}

/// Names of all model fixtures, sorted.
pub(crate) fn names() -> Vec<String> {
    let entries = fs::read_dir(folder()).unwrap().map(|e| e.unwrap().path());
    let fixtures = entries.filter(|p| p.extension().is_some_and(|e| e == "safetensors"));
    let mut names: Vec<_> =
        fixtures.map(|p| p.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort_unstable();
    names
}

impl GoldenFixture {
    /// Whether the model uses multi-head latent attention (MLA).
    pub(crate) fn uses_mla(&self) -> bool {
        self.config.contains("kv_lora_rank")
    }

    pub(crate) fn read(name: &str) -> Self {
        let bytes = fs::read(folder().join(format!("{name}.safetensors"))).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: Value = serde_json::from_slice(header).unwrap();
        let about = header["__metadata__"]["golden"].as_str().unwrap();
        let about: Value = serde_json::from_str(about).unwrap();
        let tensor = |name: &str| FixtureTensor::read(&header[name], data);
        let floats = |name: &str| tensor(name).words(f32::from_le_bytes);
        let ids = |name: &str| tensor(name).words(i32::from_le_bytes);
        let width = tensor("logits").shape[1];
        let hidden = tensor("hidden");
        let drafts = header.get("draft_tokens").is_some();
        let [_, positions, channels] = hidden.shape[..] else { panic!("hidden is [L, t, H]") };
        Self {
            config: about["config"].as_str().unwrap().to_owned(),
            seed: about["seed"].as_u64().unwrap(),
            bf16_gate: FixtureTolerance::read(&about["bf16_gate"]).unwrap(),
            fp8_gate: FixtureTolerance::read(&about["fp8_gate"]),
            tokens: ids("tokens"),
            logits: rows(&floats("logits"), width),
            hidden: floats("hidden")
                .chunks(positions * channels)
                .map(|l| rows(l, channels))
                .collect(),
            routes: if header.get("routes").is_some() { tensor("routes").routes() } else { vec![] },
            prompts: ids("prompts").into_iter().map(|n| n as usize).collect(),
            greedy: rows(&ids("greedy"), tensor("greedy").shape[1]),
            draft_tokens: if drafts { ids("draft_tokens") } else { vec![] },
            draft_logits: if drafts { rows(&floats("draft_logits"), width) } else { vec![] },
            draft_chains: if drafts {
                chains(&tensor("chain_starts"), &tensor("chains"))
            } else {
                vec![]
            },
        }
    }
}

/// Results of an EAGLE-3 layer for the tokens of a target model's fixture. The reference implementation that
/// computed them was written from the EAGLE-3 paper.
pub(crate) struct Eagle3Fixture {
    /// Name of the target model's fixture.
    pub(crate) model: String,
    /// Text of the EAGLE-3 layer's `config.json`.
    pub(crate) config: String,
    pub(crate) seed: u64,
    /// For each token except the first, the draft token with the largest logit, as an id of the target
    /// vocabulary.
    pub(crate) tokens: Vec<i32>,
    /// Logits of the layer for the last few of `tokens`: `[positions, draft vocab_size]`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Chains of draft tokens. Each draft token of a chain is computed
    /// from the layer's output for the previous draft token.
    pub(crate) chains: Vec<DraftChain>,
}

impl Eagle3Fixture {
    pub(crate) fn read(name: &str) -> Self {
        let bytes = fs::read(folder().join(format!("drafts/{name}.safetensors"))).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: Value = serde_json::from_slice(header).unwrap();
        let about: Value =
            serde_json::from_str(header["__metadata__"]["golden"].as_str().unwrap()).unwrap();
        let tensor = |name: &str| FixtureTensor::read(&header[name], data);
        let ids = |name: &str| tensor(name).words(i32::from_le_bytes);
        let logits = tensor("draft_logits");
        Self {
            model: about["model"].as_str().unwrap().to_owned(),
            config: about["config"].as_str().unwrap().to_owned(),
            seed: about["seed"].as_u64().unwrap(),
            tokens: ids("draft_tokens"),
            logits: rows(&logits.words(f32::from_le_bytes), logits.shape[1]),
            chains: chains(&tensor("chain_starts"), &tensor("chains")),
        }
    }
}

/// Draft tokens that follow one another.
pub(crate) struct DraftChain {
    /// Position after which the chain begins.
    pub(crate) start: usize,
    pub(crate) tokens: Vec<i32>,
}

/// Returns the chains that begin after the positions in `starts`, each with its row of `tokens`.
fn chains(starts: &FixtureTensor<'_>, tokens: &FixtureTensor<'_>) -> Vec<DraftChain> {
    let starts = starts.words(i32::from_le_bytes).into_iter().map(|at| at as usize);
    let tokens = rows(&tokens.words(i32::from_le_bytes), tokens.shape[1]);
    starts.zip(tokens).map(|(start, tokens)| DraftChain { start, tokens }).collect()
}

/// Checkpoint that a quantisation tool wrote, with reference logits.
pub(crate) struct QuantizedCheckpointFixture {
    /// Folder of the model.
    pub(crate) dir: PathBuf,
    pub(crate) tokens: Vec<i32>,
    /// Logits that transformers computed with dequantised weights: `[tokens, vocab_size]`.
    pub(crate) weights: Vec<Vec<f32>>,
    /// Logits that the quantisation tool's own model computed, which also quantises activations: `[tokens,
    /// vocab_size]`.
    pub(crate) quantized: Vec<Vec<f32>>,
}

impl QuantizedCheckpointFixture {
    pub(crate) fn read(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantized").join(name);
        let bytes = fs::read(dir.join("expected.safetensors")).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: Value = serde_json::from_slice(header).unwrap();
        let logits = |name: &str| {
            let tensor = FixtureTensor::read(&header[name], data);
            rows(&tensor.words(f32::from_le_bytes), tensor.shape[1])
        };
        let tokens = FixtureTensor::read(&header["tokens"], data).words(i32::from_le_bytes);
        Self { dir, tokens, weights: logits("weights"), quantized: logits("quantised") }
    }
}

/// Shape and bytes of one tensor of a fixture file.
struct FixtureTensor<'a> {
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl<'a> FixtureTensor<'a> {
    fn read(entry: &Value, data: &'a [u8]) -> Self {
        let numbers = |field: &str| -> Vec<usize> {
            let list = entry[field].as_array().unwrap();
            list.iter().map(|n| n.as_u64().unwrap() as usize).collect()
        };
        let offsets = numbers("data_offsets");
        Self { shape: numbers("shape"), bytes: &data[offsets[0]..offsets[1]] }
    }

    fn words<T>(&self, value: impl Fn([u8; 4]) -> T) -> Vec<T> {
        self.bytes.as_chunks::<4>().0.iter().map(|word| value(*word)).collect()
    }

    fn routes(&self) -> Vec<Vec<Vec<i32>>> {
        let [_, tokens, k] = self.shape[..] else { panic!("routes are [layers, T, k]") };
        let experts: Vec<i32> = self.bytes.iter().map(|e| i32::from(*e)).collect();
        experts.chunks(tokens * k).map(|layer| rows(layer, k)).collect()
    }
}

fn rows<T: Clone>(flat: &[T], width: usize) -> Vec<Vec<T>> {
    flat.chunks(width).map(<[T]>::to_vec).collect()
}
