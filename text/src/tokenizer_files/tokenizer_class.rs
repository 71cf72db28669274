//! Tokenizer class of a model folder, which determines how its tokenizer file is converted.

use serde_json::Value;

/// Generic classes of transformers, which do not identify the tokenizer.
const GENERIC_CLASSES: [&str; 3] =
    ["PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"];

/// Returns the name of the tokenizer class without the suffix `Fast`: `tokenizer_class` of
/// `tokenizer_config.json` or `config.json`, or else the class that transformers uses for the `model_type`.
pub(super) fn of(tokenizer_config: &Value, model_config: &Value) -> Option<String> {
    let declared = [tokenizer_config, model_config]
        .into_iter()
        .filter_map(|config| config["tokenizer_class"].as_str())
        .find(|class| !GENERIC_CLASSES.contains(class));
    if let Some(class) = declared {
        return Some(class.strip_suffix("Fast").unwrap_or(class).to_owned());
    }
    let class = model_config["model_type"].as_str().and_then(class_of_model_type);
    class.map(str::to_owned)
}

fn class_of_model_type(model_type: &str) -> Option<&'static str> {
    match model_type {
        "llama" | "mistral" | "mixtral" => Some("LlamaTokenizer"),
        "gpt2" | "gpt_bigcode" | "opt" | "starcoder2" => Some("GPT2Tokenizer"),
        _ if model_type.starts_with("qwen3_5") => Some("Qwen3_5Tokenizer"),
        _ if model_type.starts_with("qwen2") || model_type.starts_with("qwen3") => {
            Some("Qwen2Tokenizer")
        }
        _ => None,
    }
}
