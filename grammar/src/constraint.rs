//! Output constraints as specified by request handlers.

use super::unconstrained_preamble::UnconstrainedPreamble;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Constraint on an output, and the request field that contains it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutputConstraint {
    /// Grammar of the constrained part of the output.
    pub spec: GrammarSpec,
    /// Request field that contains the constraint; validation errors name it.
    pub param: String,
    /// Unconstrained text before the constrained part, such as reasoning; `None` = the whole output is
    /// constrained.
    pub start_after: Option<UnconstrainedPreamble>,
    /// Whether the grammar is a text of the client, so that errors have positions in this text.
    pub is_client_text: bool,
}

/// Grammar of the constrained part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GrammarSpec {
    /// JSON texts accepted by a schema.
    Json {
        /// JSON schema. Keywords that cannot be enforced are rejected.
        schema: Value,
        /// Whitespace allowed between JSON tokens.
        whitespace: JsonWhitespace,
    },
    /// Texts that match a regular expression completely, in the syntax of the `regex` crate.
    Regex(String),
    /// Any one of these texts.
    Choice(Vec<String>),
    /// Grammar in llguidance's Lark dialect; its start rule is `start`.
    Lark(String),
}

/// Whitespace allowed between the tokens of a JSON text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JsonWhitespace {
    /// Any whitespace.
    Any,
    /// No whitespace.
    None,
    /// Whitespace matching this regular expression.
    Pattern(String),
}

impl OutputConstraint {
    /// Creates a constraint on the whole output; `param` is the request field that contains it.
    pub fn new(spec: GrammarSpec, param: impl Into<String>) -> Self {
        Self { spec, param: param.into(), start_after: None, is_client_text: false }
    }

    /// Returns the constraint, changed so that it applies only after the unconstrained text `head` at the
    /// start of the output.
    #[must_use]
    pub fn start_after(self, head: impl Into<UnconstrainedPreamble>) -> Self {
        Self { start_after: Some(head.into()), ..self }
    }

    /// Returns the constraint, marked as a text of the client: errors in it have positions.
    #[must_use]
    pub fn of_client_text(self) -> Self {
        Self { is_client_text: true, ..self }
    }

    /// Returns the key of the constraint in the grammar cache. Constraints with equal keys have equal
    /// grammars.
    pub(super) fn cache_key(&self) -> String {
        let language = match &self.spec {
            GrammarSpec::Json { schema, whitespace } => format!("json {whitespace:?} {schema}"),
            GrammarSpec::Regex(regex) => format!("regex {regex}"),
            GrammarSpec::Choice(texts) => format!("choice {texts:?}"),
            GrammarSpec::Lark(grammar) => format!("lark {grammar}"),
        };
        format!("{:?} {language}", self.start_after)
    }
}

impl GrammarSpec {
    /// Returns the grammar of any JSON object.
    pub fn json_object(whitespace: JsonWhitespace) -> Self {
        Self::Json { schema: json!({"type": "object"}), whitespace }
    }
}
