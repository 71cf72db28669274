//! Lists the parameters of a tool from its schema, for syntaxes that write each parameter separately.

use super::call_grammar::CallGrammarError;
use super::schema_refs::target;
use super::tool_definition::ToolDefinition;
use serde_json::{Map, Value, json};
use std::cell::Cell;

/// Maximum number of alternatives of one schema, after all combinations of `anyOf` and `oneOf`.
const VARIANTS_MAX: usize = 32;
/// Maximum nesting depth of `$ref` references and combined schemas.
const DEPTH_MAX: usize = 16;
/// Maximum work for the object schemas of one tool: the number of visited schemas and members, each
/// multiplied by the number of alternatives that it restricts.
const WORK_MAX: usize = 8_192;
/// Keywords that express dependencies between parameters, which a sequence of parameters cannot express.
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

/// Set of parameters that a call may have: one alternative of a schema.
#[derive(Debug, Clone)]
pub(super) struct CallParameters {
    /// Parameters in the order of the schema.
    pub parameters: Vec<CallParameter>,
}

/// One parameter of a call.
#[derive(Debug, Clone)]
pub(super) struct CallParameter {
    pub key: String,
    /// Schema of the value: a part of the tool's schema.
    pub schema: Value,
    pub is_required: bool,
}

/// Remaining work budget for the schema of one tool. The budget is needed because a short schema can refer to
/// an exponential number of schemas.
#[derive(Debug)]
pub(super) struct SchemaBudget(Cell<usize>);

impl SchemaBudget {
    /// Creates the budget of one tool.
    pub(super) fn new() -> Self {
        Self(Cell::new(WORK_MAX))
    }

    /// Deducts `work` from the budget; returns whether the budget was sufficient.
    pub(super) fn spend(&self, work: usize) -> bool {
        let left = self.0.get().checked_sub(work);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// Returns the alternatives of a tool's schema; a call has the parameters of one alternative.
///
/// Errors: the schema has a keyword that expresses dependencies between parameters, or accepts no object.
pub(super) fn call_variants(
    tool: &ToolDefinition,
) -> Result<Vec<CallParameters>, CallGrammarError> {
    call_variants_of(tool, &tool.parameters, &SchemaBudget::new())
}

/// Returns the alternatives of an object nested in the arguments of a tool; `part` is the schema of the
/// object.
///
/// Errors: `part` has a keyword that expresses dependencies between parameters, or accepts no object.
pub(super) fn call_variants_of(
    tool: &ToolDefinition,
    part: &Value,
    budget: &SchemaBudget,
) -> Result<Vec<CallParameters>, CallGrammarError> {
    let schema = ArgumentSchemaCombiner { tool, budget };
    let mut variants = vec![SchemaAlternative::default()];
    schema.combine(part, DEPTH_MAX, &mut variants)?;
    let variants =
        variants.into_iter().filter_map(SchemaAlternative::completed).collect::<Vec<_>>();
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

/// One alternative of a schema while nested schemas are being combined. It borrows from the tool's schema, so
/// copies are small.
#[derive(Debug, Clone, Default)]
struct SchemaAlternative<'a> {
    members: Vec<AlternativeProperty<'a>>,
    required: Vec<&'a str>,
    /// `properties` of each schema with `additionalProperties: false`, which forbids all other parameters.
    allowed: Vec<Option<&'a Map<String, Value>>>,
}

/// Parameter of an alternative, with all schemas that the value must match.
#[derive(Debug, Clone)]
struct AlternativeProperty<'a> {
    key: &'a str,
    schemas: Vec<&'a Value>,
}

impl<'a> SchemaAlternative<'a> {
    /// Adds the required parameters that no schema describes, and drops the parameters that a schema forbids.
    /// Returns `None` if a required parameter is forbidden.
    fn completed(self) -> Option<CallParameters> {
        let mut parameters = Vec::new();
        for AlternativeProperty { key, schemas } in &self.members {
            let schema = match schemas[..] {
                [schema] => schema.clone(),
                _ => json!({ "allOf": schemas }),
            };
            let is_required = self.required.contains(key);
            parameters.push(CallParameter { key: (*key).to_owned(), schema, is_required });
        }
        for key in &self.required {
            if !parameters.iter().any(|one| one.key == *key) {
                let (key, schema) = ((*key).to_owned(), json!({}));
                parameters.push(CallParameter { key, schema, is_required: true });
            }
        }
        let is_allowed =
            |one: &CallParameter| one.schema != json!(false) && !self.forbids(&one.key);
        if parameters.iter().any(|one| one.is_required && !is_allowed(one)) {
            return None;
        }
        parameters.retain(is_allowed);
        Some(CallParameters { parameters })
    }

    /// Whether a schema with `additionalProperties: false` does not list `key`.
    fn forbids(&self, key: &str) -> bool {
        let names = |properties: &Map<String, Value>| properties.contains_key(key);
        !self.allowed.iter().all(|properties| properties.is_some_and(names))
    }

    /// Adds a schema to the schemas of a parameter.
    fn add(&mut self, key: &'a str, schema: &'a Value) {
        match self.members.iter_mut().find(|one| one.key == key) {
            Some(known) if known.schemas.contains(&schema) => {}
            Some(known) => known.schemas.push(schema),
            None => self.members.push(AlternativeProperty { key, schemas: vec![schema] }),
        }
    }

    /// Adds the parameters listed in `schema` itself, without its references and combinations.
    fn add_members(&mut self, schema: &'a Value) {
        let properties = schema["properties"].as_object();
        properties.into_iter().flatten().for_each(|(key, schema)| self.add(key, schema));
        let required = schema["required"].as_array().into_iter().flatten();
        self.required.extend(required.filter_map(Value::as_str));
        match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => self.allowed.push(properties),
            Some(additional @ Value::Object(_)) => {
                let is_undescribed = |name: &&str| {
                    properties.is_none_or(|properties| !properties.contains_key(*name))
                };
                let names = self.required.clone();
                names
                    .into_iter()
                    .filter(is_undescribed)
                    .for_each(|name| self.add(name, additional));
            }
            _ => {}
        }
    }

    /// Returns the allowed values of a parameter whose schema has `enum` or `const`.
    fn constants(&self, key: &str) -> Option<Vec<&'a Value>> {
        let member = self.members.iter().find(|member| member.key == key)?;
        let [schema] = member.schemas[..] else { return None };
        let values = schema["enum"].as_array().map(|values| values.iter().collect());
        values.or_else(|| schema.get("const").map(|value| vec![value]))
    }
}

/// Combines the nested schemas (`$ref`, `allOf`, `anyOf`, `oneOf`) of a tool's arguments into alternatives.
struct ArgumentSchemaCombiner<'a> {
    tool: &'a ToolDefinition,
    budget: &'a SchemaBudget,
}

impl<'a> ArgumentSchemaCombiner<'a> {
    fn unsupported(&self, keyword: &'static str) -> CallGrammarError {
        CallGrammarError::UnsupportedKeyword { tool: self.tool.name.clone(), keyword }
    }

    /// Restricts `variants`, the alternatives found so far, to the objects that `schema` accepts.
    fn combine(
        &self,
        schema: &'a Value,
        depth: usize,
        variants: &mut Vec<SchemaAlternative<'a>>,
    ) -> Result<(), CallGrammarError> {
        let Some(depth) = depth.checked_sub(1) else { return Err(self.unsupported("$ref")) };
        let members = schema["properties"].as_object().map_or(0, Map::len)
            + schema["required"].as_array().map_or(0, Vec::len);
        if !self.budget.spend((1 + members) * variants.len().max(1)) {
            return Err(self.unsupported("$ref"));
        }
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
            variant.add_members(schema);
        }
        if schema.get("$ref").is_some() {
            let target =
                target(&self.tool.parameters, schema).ok_or_else(|| self.unsupported("$ref"))?;
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

    /// Restricts `variants`, the alternatives found so far, to the objects that one of the schemas `choices`
    /// accepts.
    fn choose(
        &self,
        keyword: &'static str,
        choices: &'a [Value],
        depth: usize,
        variants: &mut Vec<SchemaAlternative<'a>>,
    ) -> Result<(), CallGrammarError> {
        if variants.is_empty() {
            return Ok(());
        }
        let before = std::mem::take(variants);
        let (mut chosen, mut count) = (Vec::new(), 0);
        for choice in choices {
            let mut with_choice = before.clone();
            self.combine(choice, depth, &mut with_choice)?;
            count += with_choice.len();
            if count > VARIANTS_MAX {
                return Err(self.unsupported(keyword));
            }
            chosen.push(with_choice);
        }
        // `oneOf` rejects an object that several alternatives accept.
        let overlap = |i: usize| chosen[..i].iter().any(|one| !are_disjoint(one, &chosen[i]));
        if keyword == "oneOf" && (0..chosen.len()).any(overlap) {
            return Err(self.unsupported("oneOf"));
        }
        variants.extend(chosen.into_iter().flatten());
        Ok(())
    }
}

/// Whether no object matches an alternative of `left` and also an alternative of `right`. For each pair of
/// alternatives, a required parameter must have different constants, or one alternative must require a
/// parameter that the other alternative forbids.
fn are_disjoint(left: &[SchemaAlternative<'_>], right: &[SchemaAlternative<'_>]) -> bool {
    left.iter().all(|left| right.iter().all(|right| variants_differ(left, right)))
}

fn variants_differ(left: &SchemaAlternative<'_>, right: &SchemaAlternative<'_>) -> bool {
    let forbids = |one: &SchemaAlternative<'_>, other: &SchemaAlternative<'_>| {
        other.required.iter().any(|key| one.forbids(key))
    };
    let differs = |key: &&str| {
        let (left, right) = (left.constants(key), right.constants(key));
        left.zip(right).is_some_and(|(left, right)| left.iter().all(|v| !right.contains(v)))
    };
    forbids(left, right)
        || forbids(right, left)
        || left.required.iter().any(|key| right.required.contains(key) && differs(key))
}
