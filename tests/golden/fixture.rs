//! Reads golden fixtures: small safetensors files whose metadata contains a model configuration and a seed.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Results of HF transformers for one configuration and seed.
pub(crate) struct GoldenFixture {
    /// Text of the model's `config.json`.
    pub(crate) config: String,
    pub(crate) seed: u64,
    pub(crate) bf16_gate: FixtureTolerance,
    /// Tolerance that replaces `bf16_gate` on GPUs, whose fp8 GEMMs also quantise their inputs; `None` for
    /// models without fp8 weights.
    pub(crate) fp8_gate: Option<FixtureTolerance>,
    pub(crate) tokens: Vec<i32>,
    /// Logits of all tokens: `[tokens, vocab_size]`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Hidden states after each layer at the last few positions: `[layers, positions, hidden_size]`.
    pub(crate) hidden: Vec<Vec<Vec<f32>>>,
    /// Experts of each token in ascending order: `[MoE layers, tokens, experts per token]`.
    pub(crate) routes: Vec<Vec<Vec<i32>>>,
    /// Lengths of the prompts; each prompt is a prefix of `tokens`.
    pub(crate) prompts: Vec<usize>,
    /// Tokens that greedy decoding gives after each prompt.
    pub(crate) greedy: Vec<Vec<i32>>,
    /// The MTP module's most likely draft token for each token but the first; empty for models without an MTP
    /// module.
    pub(crate) draft_tokens: Vec<i32>,
    /// Draft logits of the last few of `draft_tokens`: `[positions, vocab_size]`.
    pub(crate) draft_logits: Vec<Vec<f32>>,
}

/// Tolerance of 16-bit results for one fixture; the fixture file states the reason for it.
#[derive(Clone, Copy)]
pub(crate) struct FixtureTolerance {
    /// Factor on the common bounds of log-probability differences (`BF16_GATE`).
    pub(crate) scale: f32,
    /// Minimum share of positions at which the router must choose the experts that it chooses in f32.
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
    /// Whether the model uses MLA.
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
        }
    }
}

/// Results of an EAGLE-3 layer for the tokens of a model's fixture, computed by a reference that was written
/// from the paper.
pub(crate) struct Eagle3Fixture {
    /// Name of the target model's fixture.
    pub(crate) model: String,
    /// Text of the EAGLE-3 layer's `config.json`.
    pub(crate) config: String,
    pub(crate) seed: u64,
    /// Most likely draft token for each token but the first, as an id of the target vocabulary.
    pub(crate) tokens: Vec<i32>,
    /// Draft logits of the last few of `tokens`: `[positions, draft vocab_size]`.
    pub(crate) logits: Vec<Vec<f32>>,
    /// Positions with the chains of draft tokens after them; each draft token is computed from the layer's
    /// output for the previous one.
    pub(crate) chains: Vec<(usize, Vec<i32>)>,
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
        let (logits, chains) = (tensor("draft_logits"), tensor("chains"));
        let starts = ids("chained_behind").into_iter().map(|at| at as usize);
        Self {
            model: about["model"].as_str().unwrap().to_owned(),
            config: about["config"].as_str().unwrap().to_owned(),
            seed: about["seed"].as_u64().unwrap(),
            tokens: ids("draft_tokens"),
            logits: rows(&logits.words(f32::from_le_bytes), logits.shape[1]),
            chains: starts.zip(rows(&ids("chains"), chains.shape[1])).collect(),
        }
    }
}

/// Checkpoint that a quantisation tool wrote, with logits of references for it.
pub(crate) struct QuantizedCheckpointFixture {
    /// Folder of the model.
    pub(crate) dir: PathBuf,
    pub(crate) tokens: Vec<i32>,
    /// Logits of transformers with dequantised weights: `[tokens, vocab_size]`.
    pub(crate) weights: Vec<Vec<f32>>,
    /// Logits of the tool's model, which quantises activations: `[tokens, vocab_size]`.
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
