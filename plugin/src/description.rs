//! Description of an opened model for its host, in JSON.

use ops::{DType, KvPoolLayout};
use serde_json::{Value, json};

use crate::{ForeignModel, PluginError};

impl ForeignModel {
    /// Returns the facts of `hadron_describe` as a JSON object.
    pub(crate) fn description(&self) -> Result<String, PluginError> {
        let layer = match self.kv_layout(1, 1)? {
            KvPoolLayout::Heads(layout) => json!({
                "kind": "heads",
                "kv_heads": layout.kv_heads,
                "head_dim": layout.head_dim,
                "dtype": dtype_name(layout.dtype),
            }),
            KvPoolLayout::Mla(layout) => json!({
                "kind": "mla",
                "width": layout.width(),
                "dtype": dtype_name(layout.dtype),
            }),
            KvPoolLayout::HeadsByGroup(_) => Value::Null, // Rejected when the model is opened.
        };
        let config = &self.config;
        let description = json!({
            "architecture": config.architecture.name(),
            "device": self.ops.device().name(),
            "hidden_size": config.hidden,
            "vocab_size": config.vocab,
            "weight_bytes": self.weight_bytes,
            "heads": config.heads / self.ranks.ranks.tp.size,
            "kv_layers": vec![layer; self.grouping.pool_layers()],
        });
        Ok(description.to_string())
    }
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F16 => "float16",
        DType::F8E4M3 => "fp8",
        _ => "bfloat16",
    }
}
