//! A model opened through the C interface, with the texts of its errors.

use std::ffi::c_char;
use std::fs;
use std::path::Path;

use hadron_plugin::abi::{
    hadron_bind_kv, hadron_close, hadron_count, hadron_describe, hadron_forward, hadron_logits,
    hadron_open, hadron_rehearse,
};
use hadron_plugin::{ForeignArray, ForeignRanks, ForeignStep, ModelCounters, ModelHandle};
use serde_json::{Value, json};

/// Call that did not succeed: its status and the text of the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CallError {
    pub(crate) status: i32,
    pub(crate) text: String,
}

const ROOM: usize = 2048;

/// Runs a call with memory for the text of its error.
fn call(run: impl FnOnce(*mut c_char, u64) -> i32) -> Result<(), CallError> {
    let mut text = [0u8; ROOM];
    let status = run(text.as_mut_ptr().cast(), ROOM as u64);
    if status == 0 {
        return Ok(());
    }
    let len = text.iter().position(|&byte| byte == 0).unwrap();
    Err(CallError { status, text: String::from_utf8(text[..len].to_vec()).unwrap() })
}

/// Model of a host.
pub(crate) struct TestModel(pub(crate) *mut ModelHandle);

// SAFETY: calls with a model may come from any thread.
unsafe impl Send for TestModel {}

/// A golden fixture: the model's configuration, the seed of its weights, and logits of HF transformers.
pub(crate) struct PluginFixture {
    pub(crate) config: String,
    pub(crate) seed: u64,
    pub(crate) tokens: Vec<i32>,
    pub(crate) logits: Vec<f32>,
}

impl PluginFixture {
    /// Reads a fixture of `tests/data/golden`.
    pub(crate) fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden");
        let bytes = fs::read(folder.join(format!("{name}.safetensors"))).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: Value = serde_json::from_slice(header).unwrap();
        let about = header["__metadata__"]["golden"].as_str().unwrap();
        let about: Value = serde_json::from_str(about).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            let ends = &header[name]["data_offsets"];
            let at = |i: usize| ends[i].as_u64().unwrap() as usize;
            data[at(0)..at(1)].chunks(4).map(|word| word.try_into().unwrap()).collect()
        };
        Self {
            config: about["config"].as_str().unwrap().to_owned(),
            seed: about["seed"].as_u64().unwrap(),
            tokens: words("tokens").into_iter().map(i32::from_le_bytes).collect(),
            logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
        }
    }

    /// Returns the fixture with another number of layers, for which there are no logits of HF transformers.
    pub(crate) fn with_layers(self, layers: usize) -> Self {
        let mut config: Value = serde_json::from_str(&self.config).unwrap();
        config["num_hidden_layers"] = json!(layers);
        Self { config: config.to_string(), logits: vec![], ..self }
    }

    /// Options that open the model on the CPU in f32, with the configuration in `dir`.
    pub(crate) fn options(&self, dir: &Path) -> Value {
        fs::write(dir.join("config.json"), &self.config).unwrap();
        json!({
            "model_dir": dir,
            "device": "cpu",
            "dtype": "float32",
            "load_format": "synth",
            "seed": self.seed,
            "max_model_len": 512,
            "max_num_tokens": 256,
            "max_num_rows": 16,
            "threads": 1,
        })
    }
}

impl TestModel {
    /// Opens a model with options in JSON.
    pub(crate) fn open(options: &Value, ranks: Option<&ForeignRanks>) -> Result<Self, CallError> {
        let json = options.to_string();
        let ranks = ranks.map_or(std::ptr::null(), std::ptr::from_ref);
        let mut model = std::ptr::null_mut();
        // SAFETY: all pointers are valid.
        call(|error, room| unsafe {
            let text = json.as_ptr().cast();
            hadron_open(text, json.len() as u64, ranks, &raw mut model, error, room)
        })?;
        Ok(Self(model))
    }

    /// Facts of the model.
    pub(crate) fn describe(&self) -> Value {
        let mut json = [0u8; 16 << 10];
        // SAFETY: all pointers are valid.
        call(|error, room| unsafe {
            hadron_describe(self.0, json.as_mut_ptr().cast(), json.len() as u64, error, room)
        })
        .unwrap();
        let len = json.iter().position(|&byte| byte == 0).unwrap();
        serde_json::from_slice(&json[..len]).unwrap()
    }

    pub(crate) fn rehearse(&self) -> Result<(), CallError> {
        // SAFETY: all pointers are valid.
        call(|error, room| unsafe { hadron_rehearse(self.0, error, room) })
    }

    pub(crate) fn bind_kv(
        &self,
        layers: &[ForeignArray],
        blocks: u64,
        block_tokens: u64,
    ) -> Result<(), CallError> {
        let (first, count) = (layers.as_ptr(), layers.len() as u64);
        // SAFETY: the arrays belong to a host that outlives the model.
        call(|error, room| unsafe {
            hadron_bind_kv(self.0, first, count, blocks, block_tokens, error, room)
        })
    }

    pub(crate) fn forward(&self, step: &ForeignStep) -> Result<(), CallError> {
        // SAFETY: the arrays belong to a host that outlives the model.
        call(|error, room| unsafe { hadron_forward(self.0, step, error, room) })
    }

    pub(crate) fn logits(
        &self,
        stream: u64,
        hidden: &ForeignArray,
        logits: &ForeignArray,
        rows: u64,
    ) -> Result<(), CallError> {
        // SAFETY: the arrays belong to a host that outlives the model.
        call(|error, room| unsafe {
            hadron_logits(self.0, stream, hidden, logits, rows, error, room)
        })
    }

    pub(crate) fn counters(&self) -> ModelCounters {
        let mut counters = ModelCounters::default();
        // SAFETY: all pointers are valid.
        call(|error, room| unsafe { hadron_count(self.0, &raw mut counters, error, room) })
            .unwrap();
        counters
    }
}

impl Drop for TestModel {
    fn drop(&mut self) {
        // SAFETY: the model was opened and is not used again.
        unsafe { hadron_close(self.0) };
    }
}
