//! What an output must be, as a request handler describes it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What an output must be, and who says so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputConstraint {
    /// What it must be.
    pub spec: GrammarSpec,
    /// The request field that asks for it: what a refusal names.
    pub param: String,
    /// Text of the output behind which the constraint begins; anything may stand before. `None` = at once.
    pub start_after: Option<String>,
}

/// A language.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GrammarSpec {
    /// JSON texts that a schema accepts.
    Json {
        /// The schema; keywords that cannot be enforced are refused.
        schema: Value,
        /// What may stand between its tokens.
        whitespace: JsonWhitespace,
    },
    /// Texts that a regular expression matches from end to end, in the syntax of the `regex` crate.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in llguidance's dialect of Lark, from its rule `start` on.
    Lark(String),
}

/// What may stand between the tokens of a JSON text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JsonWhitespace {
    /// Any white space.
    Any,
    /// Nothing.
    None,
    /// What this regular expression matches.
    Pattern(String),
}

impl OutputConstraint {
    /// A constraint on the whole output, asked for by the field `param`.
    pub fn new(form: GrammarSpec, param: impl Into<String>) -> Self {
        Self { spec: form, param: param.into(), start_after: None }
    }

    /// The same behind `marker`.
    #[must_use]
    pub fn start_after(self, marker: impl Into<String>) -> Self {
        Self { start_after: Some(marker.into()), ..self }
    }

    /// A text that no other language shares.
    pub(super) fn cache_key(&self) -> String {
        let form = match &self.spec {
            GrammarSpec::Json { schema, whitespace: spaces } => format!("json {spaces:?} {schema}"),
            GrammarSpec::Regex(regex) => format!("regex {regex}"),
            GrammarSpec::Choice(texts) => format!("choice {texts:?}"),
            GrammarSpec::Lark(grammar) => format!("lark {grammar}"),
        };
        format!("{:?} {form}", self.start_after)
    }
}

impl GrammarSpec {
    /// Any JSON object.
    pub fn json_object(spaces: JsonWhitespace) -> Self {
        Self::Json { schema: json!({"type": "object"}), whitespace: spaces }
    }
}
