//! Parameters of a tool, listed from its schema for syntaxes that write each parameter separately.

use super::call_grammar::CallGrammarError;
use super::schema_refs::target;
use super::tool_definition::ToolDefinition;
use serde_json::{Map, Value, json};

/// Maximum number of combinations of alternatives (`anyOf`, `oneOf`) of one schema.
const VARIANTS_MAX: usize = 32;
/// Maximum depth of references and combined schemas.
const DEPTH_MAX: usize = 16;
/// Keywords that relate parameters to each other, which a sequence of parameters cannot express.
const UNSUPPORTED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "enum",
    "const",
];

/// Parameters that a call may have together: one alternative of a schema.
#[derive(Debug, Clone, Default)]
pub(super) struct CallParameters {
    /// Parameters in the order of the schema.
    pub parameters: Vec<CallParameter>,
    required: Vec<String>,
    /// Names to which each schema without additional properties restricts the parameters.
    allowed: Vec<Vec<String>>,
}

/// One parameter of a call.
#[derive(Debug, Clone)]
pub(super) struct CallParameter {
    pub key: String,
    /// Schema of the value, a part of the tool's schema.
    pub schema: Value,
    pub is_required: bool,
}

/// Returns the alternatives of a tool's schema: a call has the parameters of one of them.
///
/// Errors: the schema has a keyword that relates parameters to each other, or accepts no object.
pub(super) fn call_variants(
    tool: &ToolDefinition,
) -> Result<Vec<CallParameters>, CallGrammarError> {
    call_variants_of(tool, &tool.parameters)
}

/// Returns the alternatives of an object within the arguments of a tool; `part` is its schema.
///
/// Errors: those of `call_variants`.
pub(super) fn call_variants_of(
    tool: &ToolDefinition,
    part: &Value,
) -> Result<Vec<CallParameters>, CallGrammarError> {
    let schema = ObjectSchema { tool, root: &tool.parameters };
    let mut variants = vec![CallParameters::default()];
    schema.combine(part, DEPTH_MAX, &mut variants)?;
    let variants = variants.into_iter().filter_map(CallParameters::completed).collect::<Vec<_>>();
    if variants.is_empty() {
        return Err(CallGrammarError::NoObject { tool: tool.name.clone() });
    }
    for (keyword, fits) in [("minProperties", true), ("maxProperties", false)] {
        let Some(limit) = part[keyword].as_u64() else { continue };
        let count = |variant: &CallParameters| {
            let counted = variant.parameters.iter().filter(|one| !fits || one.is_required);
            counted.count() as u64
        };
        let is_kept =
            |variant| if fits { count(variant) >= limit } else { count(variant) <= limit };
        if !variants.iter().all(is_kept) {
            return Err(schema.unsupported(keyword));
        }
    }
    Ok(variants)
}

impl CallParameters {
    /// Adds a required parameter that no schema describes, and drops the parameters that a schema forbids; `None`
    /// if a required one is forbidden.
    fn completed(mut self) -> Option<Self> {
        for key in &self.required {
            if !self.parameters.iter().any(|one| one.key == *key) {
                let (key, schema) = (key.clone(), json!({}));
                self.parameters.push(CallParameter { key, schema, is_required: true });
            }
        }
        for one in &mut self.parameters {
            one.is_required = self.required.contains(&one.key);
        }
        let allowed = &self.allowed;
        let is_allowed = |one: &CallParameter| {
            one.schema != json!(false) && allowed.iter().all(|names| names.contains(&one.key))
        };
        if self.parameters.iter().any(|one| one.is_required && !is_allowed(one)) {
            return None;
        }
        self.parameters.retain(is_allowed);
        Some(self)
    }

    /// Adds the schema of a parameter, in addition to the schemas that it has already.
    fn add(&mut self, key: &str, schema: &Value) {
        match self.parameters.iter_mut().find(|one| one.key == key) {
            Some(known) => known.schema = json!({"allOf": [known.schema, schema]}),
            None => self.parameters.push(CallParameter {
                key: key.to_owned(),
                schema: schema.clone(),
                is_required: false,
            }),
        }
    }
}

/// Schema of a tool's arguments.
struct ObjectSchema<'a> {
    tool: &'a ToolDefinition,
    root: &'a Value,
}

impl ObjectSchema<'_> {
    fn unsupported(&self, keyword: &'static str) -> CallGrammarError {
        CallGrammarError::UnsupportedKeyword { tool: self.tool.name.clone(), keyword }
    }

    /// Restricts `variants` to the objects that `schema` accepts.
    fn combine(
        &self,
        schema: &Value,
        depth: usize,
        variants: &mut Vec<CallParameters>,
    ) -> Result<(), CallGrammarError> {
        let Some(depth) = depth.checked_sub(1) else { return Err(self.unsupported("$ref")) };
        let accepts_objects = match &schema["type"] {
            Value::Null => *schema != Value::Bool(false),
            Value::Array(names) => names.iter().any(|name| name == "object"),
            name => name == "object",
        };
        if !accepts_objects {
            variants.clear();
        }
        let keyword = UNSUPPORTED
            .iter()
            .find(|keyword| schema.get(**keyword).is_some_and(|value| *value != json!({})));
        if let Some(keyword) = keyword {
            return Err(self.unsupported(keyword));
        }
        for variant in variants.iter_mut() {
            add_members(schema, variant);
        }
        if schema.get("$ref").is_some() {
            let target = target(self.root, schema).ok_or_else(|| self.unsupported("$ref"))?;
            self.combine(target, depth, variants)?;
        }
        for part in schema["allOf"].as_array().into_iter().flatten() {
            self.combine(part, depth, variants)?;
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(choices) = schema[keyword].as_array() {
                self.choose(keyword, choices, depth, variants)?;
            }
        }
        Ok(())
    }

    /// Restricts `variants` to the objects that one of `choices` accepts.
    fn choose(
        &self,
        keyword: &'static str,
        choices: &[Value],
        depth: usize,
        variants: &mut Vec<CallParameters>,
    ) -> Result<(), CallGrammarError> {
        let before = std::mem::take(variants);
        let mut chosen = Vec::new();
        for choice in choices {
            let mut with_choice = before.clone();
            self.combine(choice, depth, &mut with_choice)?;
            chosen.push(with_choice);
        }
        // An object that several alternatives of `oneOf` accept is invalid.
        let overlap = |i: usize| chosen[..i].iter().any(|one| !are_disjoint(one, &chosen[i]));
        if keyword == "oneOf" && (0..chosen.len()).any(overlap) {
            return Err(self.unsupported("oneOf"));
        }
        variants.extend(chosen.into_iter().flatten());
        if variants.len() > VARIANTS_MAX {
            return Err(self.unsupported(keyword));
        }
        Ok(())
    }
}

/// Adds the parameters that `schema` itself names.
fn add_members(schema: &Value, variant: &mut CallParameters) {
    let empty = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    properties.iter().for_each(|(key, schema)| variant.add(key, schema));
    let required = schema["required"].as_array().into_iter().flatten();
    variant.required.extend(required.filter_map(Value::as_str).map(str::to_owned));
    match schema.get("additionalProperties") {
        Some(Value::Bool(false)) => variant.allowed.push(properties.keys().cloned().collect()),
        Some(additional @ Value::Object(_)) => {
            let names = variant.required.clone();
            let undescribed = names.iter().filter(|name| !properties.contains_key(*name));
            undescribed.for_each(|name| variant.add(name, additional));
        }
        _ => {}
    }
}

/// Whether no object has the parameters of a variant of both lists: a required parameter has different
/// constants, or one list requires a parameter that the other one forbids.
fn are_disjoint(left: &[CallParameters], right: &[CallParameters]) -> bool {
    left.iter().all(|left| right.iter().all(|right| variants_differ(left, right)))
}

fn variants_differ(left: &CallParameters, right: &CallParameters) -> bool {
    let forbids = |one: &CallParameters, other: &CallParameters| {
        other.required.iter().any(|key| one.allowed.iter().any(|names| !names.contains(key)))
    };
    let constants = |one: &CallParameters, key: &String| {
        let schema = &one.parameters.iter().find(|parameter| parameter.key == *key)?.schema;
        let values = schema["enum"].as_array().cloned();
        values.or_else(|| schema.get("const").map(|value| vec![value.clone()]))
    };
    let differs = |key: &String| {
        let (left, right) = (constants(left, key), constants(right, key));
        left.zip(right).is_some_and(|(left, right)| left.iter().all(|v| !right.contains(v)))
    };
    forbids(left, right)
        || forbids(right, left)
        || left.required.iter().any(|key| right.required.contains(key) && differs(key))
}
