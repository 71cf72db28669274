//! Fuzz target: `config.json` of a model folder.

use models::ModelConfig;
use std::path::Path;

pub(crate) fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(config) = ModelConfig::from_json(Path::new("x"), text) else { return };
    // Functions that compute values from a valid configuration must not panic.
    let _ = (config.context_max(), config.kv_layers(), config.sparse_layers());
    let _ = (config.rotary(), config.value_dim(), config.qk_norm());
}
