//! What an output must be, as a request handler describes it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What an output must be, and who says so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Constraint {
    /// What it must be.
    pub form: Form,
    /// The request field that asks for it: what a refusal names.
    pub param: String,
    /// Text of the output behind which the constraint begins; anything may stand before. `None` = at once.
    pub after: Option<String>,
}

/// A language.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Form {
    /// JSON texts that a schema accepts.
    Json {
        /// The schema; keywords that cannot be enforced are refused.
        schema: Value,
        /// What may stand between its tokens.
        spaces: Spaces,
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
pub enum Spaces {
    /// Any white space.
    Any,
    /// Nothing.
    None,
    /// What this regular expression matches.
    Pattern(String),
}

impl Constraint {
    /// A constraint on the whole output, asked for by the field `param`.
    pub fn new(form: Form, param: impl Into<String>) -> Self {
        Self { form, param: param.into(), after: None }
    }

    /// The same behind `marker`.
    #[must_use]
    pub fn after(self, marker: impl Into<String>) -> Self {
        Self { after: Some(marker.into()), ..self }
    }

    /// A text that no other language shares.
    pub(super) fn key(&self) -> String {
        let form = match &self.form {
            Form::Json { schema, spaces } => format!("json {spaces:?} {schema}"),
            Form::Regex(regex) => format!("regex {regex}"),
            Form::Choice(texts) => format!("choice {texts:?}"),
            Form::Lark(grammar) => format!("lark {grammar}"),
        };
        format!("{:?} {form}", self.after)
    }
}

impl Form {
    /// Any JSON object.
    pub fn json_object(spaces: Spaces) -> Self {
        Self::Json { schema: json!({"type": "object"}), spaces }
    }
}
