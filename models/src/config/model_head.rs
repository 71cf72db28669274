//! Head of a checkpoint: LM head, classification head or none. The suffix of the architecture name determines
//! the head.

use super::ModelArchitecture;
use super::ModelConfigError;
use super::json_fields::JsonFields;

/// Suffix of the names of architectures that generate text.
const LANGUAGE_SUFFIX: &str = "ForCausalLM";
/// Field that lists the tokens whose logits a classification head compares.
const CLASSIFIER_TOKENS: &str = "classifier_from_token";

/// Head after the final norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelHead {
    /// LM head (`…ForCausalLM`).
    Language,
    /// No head (`…Model`): the checkpoint computes hidden states only.
    Absent,
    /// Classification head with one output (`…ForSequenceClassification`).
    Classifier {
        /// Whether a sigmoid follows.
        sigmoid: bool,
    },
    /// LM head as classifier: the score is the difference of the logits of two tokens
    /// (`…ForSequenceClassification` with `classifier_from_token`).
    TokenClassifier {
        /// Tokens of the negative and the positive label, such as `no` and `yes`.
        tokens: [String; 2],
    },
}

impl ModelHead {
    /// Returns whether the model generates text; a classifier that uses an LM head does not.
    #[must_use]
    pub fn generates(&self) -> bool {
        *self == Self::Language
    }

    /// Returns whether the checkpoint has an LM head, either stored or tied to the embedding.
    pub(crate) fn has_lm_head(&self) -> bool {
        matches!(self, Self::Language | Self::TokenClassifier { .. })
    }
}

/// Architecture and head of a checkpoint.
pub(super) struct CheckpointKind {
    pub(super) architecture: ModelArchitecture,
    pub(super) head: ModelHead,
}

impl CheckpointKind {
    /// Reads the field `architectures`.
    pub(super) fn read(fields: &JsonFields) -> Result<Self, ModelConfigError> {
        let names = fields.strings("architectures")?.unwrap_or_default();
        let Some(&name) = names.first() else { return Err(fields.missing("architectures")) };
        let found = ModelArchitecture::ALL.into_iter().find_map(|architecture| {
            if architecture.name() == name {
                return Some(Self { architecture, head: ModelHead::Language });
            }
            let family = match architecture {
                // `Gemma3Model`, `Gemma3ForSequenceClassification` and `Gemma4Model` are multimodal.
                ModelArchitecture::Gemma3 => "Gemma3Text",
                ModelArchitecture::Gemma4 => "Gemma4Text",
                _ => architecture.name().strip_suffix(LANGUAGE_SUFFIX)?,
            };
            match name.strip_prefix(family)? {
                "Model" => Some(Self { architecture, head: ModelHead::Absent }),
                "ForSequenceClassification" => {
                    Some(Self { architecture, head: ModelHead::Classifier { sigmoid: true } })
                }
                _ => None,
            }
        });
        let Some(mut kind) = found else {
            let supported = ModelArchitecture::ALL.map(ModelArchitecture::name).join(", ");
            return Err(fields.unknown_architecture(name, supported));
        };
        if let ModelHead::Classifier { .. } = kind.head {
            kind.head = classifier(fields)?;
        }
        Ok(kind)
    }
}

/// Reads the head of a checkpoint for sequence classification.
fn classifier(fields: &JsonFields) -> Result<ModelHead, ModelConfigError> {
    if let Some(tokens) = fields.strings(CLASSIFIER_TOKENS)? {
        return token_classifier(fields, &tokens);
    }
    let listed = fields.object("id2label")?.map(|labels| labels.names().count() as u64);
    let labels = match fields.value("num_labels") {
        Some(_) => fields.size("num_labels", 1 << 20)? as u64,
        None => listed.unwrap_or(2),
    };
    if labels != 1 {
        let field = if listed.is_some() { "id2label" } else { "num_labels" };
        return Err(
            fields.unsupported(field, "classifiers with one label are, which score text pairs")
        );
    }
    Ok(ModelHead::Classifier { sigmoid: sigmoid(fields)? })
}

/// Reads the head that compares the logits of `tokens`.
fn token_classifier(fields: &JsonFields, tokens: &[&str]) -> Result<ModelHead, ModelConfigError> {
    let method = fields.text("method")?;
    let is_original = fields.flag("is_original_qwen3_reranker", false)?;
    if !is_original && method != Some("from_2_way_softmax") {
        return Err(fields.unsupported(
            "method",
            "classifier_from_token needs from_2_way_softmax or is_original_qwen3_reranker",
        ));
    }
    let &[no, yes] = tokens else {
        return Err(fields
            .unsupported(CLASSIFIER_TOKENS, "the score compares two tokens, such as no and yes"));
    };
    Ok(ModelHead::TokenClassifier { tokens: [no, yes].map(str::to_owned) })
}

/// Returns whether a sigmoid follows the classification head, according to the fields that
/// sentence-transformers writes; the default is a sigmoid.
fn sigmoid(fields: &JsonFields) -> Result<bool, ModelConfigError> {
    const MEMBER: &str = "activation_fn";
    const OLD_FIELD: &str = "sbert_ce_default_activation_function";
    let object = fields.object("sentence_transformers")?;
    let (fields, field) = match &object {
        Some(object) if object.value(MEMBER).is_some() => (object, MEMBER),
        _ => (fields, OLD_FIELD),
    };
    match fields.text(field)?.map(|path| path.rsplit('.').next().unwrap_or_default()) {
        None | Some("Sigmoid") => Ok(true),
        Some("Identity") => Ok(false),
        Some(_) => Err(fields.unsupported(field, "supported are Sigmoid and Identity")),
    }
}

/// Reads the Matryoshka dimensions of an embedding model (`matryoshka_dimensions`, `is_matryoshka`): `None` =
/// embeddings cannot be truncated, an empty list = any number of dimensions is allowed.
pub(super) fn matryoshka(fields: &JsonFields) -> Result<Option<Vec<u32>>, ModelConfigError> {
    let listed = fields.tokens("matryoshka_dimensions")?;
    let any = fields.flag("is_matryoshka", false)?;
    Ok((any || !listed.is_empty()).then_some(listed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use crate::weight_table::tensors;
    use crate::weight_table::tests::tiny_json;
    use serde_json::{Value, json};
    use std::path::Path;

    fn read(architecture: &str, members: &Value) -> Result<ModelConfig, String> {
        let mut config: Value = serde_json::from_str(&tiny_json(architecture)).unwrap();
        config.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        ModelConfig::from_json(Path::new("config.json"), &config.to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn suffix_of_the_architecture_selects_the_head() {
        let one = json!({"id2label": {"0": "LABEL_0"}});
        for (name, members, head) in [
            ("Qwen3ForCausalLM", json!({}), ModelHead::Language),
            ("Qwen3Model", json!({}), ModelHead::Absent),
            ("LlamaModel", json!({}), ModelHead::Absent),
            ("Qwen3MoeModel", json!({}), ModelHead::Absent),
            ("Qwen2ForSequenceClassification", one, ModelHead::Classifier { sigmoid: true }),
            (
                "MistralForSequenceClassification",
                json!({"num_labels": 1, "sentence_transformers": {
                    "activation_fn": "torch.nn.modules.linear.Identity"}}),
                ModelHead::Classifier { sigmoid: false },
            ),
            (
                "Qwen3ForSequenceClassification",
                json!({"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}),
                ModelHead::TokenClassifier { tokens: ["no".to_owned(), "yes".to_owned()] },
            ),
        ] {
            assert_eq!(read(name, &members).unwrap().head, head, "{name}");
        }
    }

    #[test]
    fn weights_follow_the_head() {
        let heads = |name: &str, members| -> Vec<String> {
            let names = tensors(&read(name, &members).unwrap()).into_iter().map(|spec| spec.name);
            names.filter(|name| !name.starts_with("model.")).collect()
        };
        assert_eq!(heads("Qwen3ForCausalLM", json!({})), ["lm_head.weight"]);
        assert!(heads("Qwen3Model", json!({})).is_empty());
        let one = json!({"num_labels": 1});
        assert_eq!(heads("Qwen3ForSequenceClassification", one), ["score.weight"]);
        let tokens = json!({"classifier_from_token": ["0", "1"], "method": "from_2_way_softmax"});
        assert_eq!(heads("Qwen2ForSequenceClassification", tokens), ["lm_head.weight"]);
    }

    #[test]
    fn unsupported_heads_are_rejected_by_name() {
        for (name, members, field) in [
            ("Qwen3ForSequenceClassification", json!({}), "num_labels"),
            (
                "Qwen3ForSequenceClassification",
                json!({"id2label": {"0": "a", "1": "b"}}),
                "id2label",
            ),
            (
                "Qwen3ForSequenceClassification",
                json!({"classifier_from_token": ["a", "b"]}),
                "method",
            ),
            (
                "Qwen3ForSequenceClassification",
                json!({"classifier_from_token": ["yes"], "method": "from_2_way_softmax"}),
                "classifier_from_token",
            ),
            (
                "Qwen3ForSequenceClassification",
                json!({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Tanh"}),
                "sbert_ce_default_activation_function",
            ),
            ("Qwen3ForTokenClassification", json!({}), "architectures"),
            ("Qwen2Model", json!({"is_causal": false}), "is_causal"),
        ] {
            let error = read(name, &members).unwrap_err();
            assert!(error.contains(&format!("`{field}`")), "{error}");
        }
    }

    #[test]
    fn matryoshka_dimensions_are_read() {
        let dimensions = |members| read("Qwen3Model", &members).unwrap().matryoshka;
        assert_eq!(dimensions(json!({})), None);
        assert_eq!(dimensions(json!({"is_matryoshka": true})), Some(Vec::new()));
        assert_eq!(dimensions(json!({"matryoshka_dimensions": [16, 32]})), Some(vec![16, 32]));
    }
}
