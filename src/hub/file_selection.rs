//! Files of a repository that a model needs.

use std::collections::BTreeSet;

/// Folder of additional chat templates, which are downloaded with the tokenizer files.
const TEMPLATE_FOLDER: &str = "additional_chat_templates/";

/// Subset of the files of a model repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubFileSet {
    /// All files that are needed for serving.
    Everything,
    /// All files that are needed for serving except the weights, which are synthetic.
    WithoutWeights,
    /// Tokenizer files only.
    Tokenizer,
    /// Weights and configuration, without the tokenizer. For a draft model, which uses the tokenizer of the
    /// target model.
    Weights,
    /// Configuration files only.
    Config,
}

impl HubFileSet {
    pub(super) fn has_text(self) -> bool {
        !matches!(self, Self::Weights | Self::Config)
    }

    pub(super) fn has_weights(self) -> bool {
        matches!(self, Self::Everything | Self::Weights)
    }
}

/// Whether a file is one of the additional chat templates.
pub(super) fn is_named_template(file: &str) -> bool {
    let name = file.strip_prefix(TEMPLATE_FOLDER).and_then(|name| name.strip_suffix(".jinja"));
    name.is_some_and(|name| !name.is_empty() && !name.contains('/'))
}

/// Returns the names of the weight files in a safetensors index. Rejects names that are not plain file names.
pub(super) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    /// Contents of `model.safetensors.index.json`.
    #[derive(serde::Deserialize)]
    struct SafetensorsIndex {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: SafetensorsIndex = serde_json::from_slice(index).map_err(|e| e.to_string())?;
    let files: BTreeSet<String> = index.weight_map.into_values().collect();
    match files.iter().find(|name| !name.ends_with(".safetensors") || name.contains(['/', '\\'])) {
        Some(name) => Err(format!("{name:?} is not the name of a tensor file")),
        None => Ok(files),
    }
}
