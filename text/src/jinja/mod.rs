//! Interpreter of Jinja2 templates compatible with transformers, which uses Jinja2 3.1 in its immutable
//! sandbox, without loader and automatic escaping, with `trim_blocks`, `lstrip_blocks`, loop controls and the
//! tag `{% generation %}`. Values have the types, operators, methods and text forms of Python, so that a
//! rendered prompt equals that of transformers byte for byte; a feature for which this is impossible is an
//! error. Instructions, sizes and nesting are limited.

mod arguments;
mod arithmetic;
mod ast;
mod attributes;
mod calls;
mod comparison;
mod dict;
mod error;
mod escapes;
mod evaluation;
mod evaluator;
mod filters;
mod format_spec;
mod iteration;
mod json;
mod json_input;
mod lexer;
mod literals;
mod loop_state;
mod markup;
mod methods;
mod number_format;
mod numbers;
mod parser;
mod parser_expressions;
mod parser_macros;
mod parser_operands;
mod parser_statements;
mod percent_format;
mod python_text;
mod scope;
mod slices;
mod statements;
mod str_format;
#[cfg(test)]
mod template_tests;
mod token;
mod unicode;
mod value;
mod value_tests;
mod variable_usage;

pub(crate) use error::{JinjaError, JinjaErrorKind};
pub(crate) use evaluator::RenderLimits;
pub(crate) use numbers::float_text;

use ast::{BlockNode, NameId, StatementList};
use error::JinjaResult;
use evaluator::TemplateEvaluator;
use serde_json::{Map, Value};
use std::sync::Arc;
use value::{BuiltinFunction, JinjaValue, SpecialVariableIds};

/// Compiled template.
#[derive(Debug)]
pub(crate) struct JinjaTemplate {
    code: Arc<CompiledTemplateTree>,
}

/// Syntax tree of a compiled template, with its names, blocks and special variables.
#[derive(Debug)]
pub(crate) struct CompiledTemplateTree {
    body: StatementList,
    names: Vec<Arc<str>>,
    blocks: Vec<Arc<BlockNode>>,
    special: SpecialVariableIds,
}

impl JinjaTemplate {
    /// Compiles the template `source`.
    ///
    /// Errors: the template is invalid.
    pub(crate) fn compile(source: &str) -> JinjaResult<Self> {
        let mut parsed = parser::parse(source)?;
        let mut id = |name: &str| {
            let index =
                parsed.names.iter().position(|known| &**known == name).unwrap_or_else(|| {
                    parsed.names.push(Arc::from(name));
                    parsed.names.len() - 1
                });
            NameId(index as u32)
        };
        let special = SpecialVariableIds {
            caller: id("caller"),
            kwargs: id("kwargs"),
            varargs: id("varargs"),
            loop_object: id("loop"),
        };
        let parser::ParsedTemplate { body, names, blocks } = parsed;
        Ok(Self { code: Arc::new(CompiledTemplateTree { body, names, blocks, special }) })
    }

    /// Whether the template has a variable of the name `name`, as opposed to an attribute or text.
    pub(crate) fn has_variable(&self, name: &str) -> bool {
        self.code.names.iter().any(|known| &**known == name)
    }

    /// Renders the template with `variables`; `strftime_now` formats the current time.
    ///
    /// Errors: the template fails, or a limit is exceeded.
    pub(crate) fn render(
        &self,
        variables: &Map<String, Value>,
        limits: RenderLimits,
        strftime_now: fn(&str) -> String,
    ) -> JinjaResult<String> {
        let slots = self.code.names.iter().map(|name| initial_value(name, variables));
        let slots: JinjaResult<Vec<Option<JinjaValue>>> = slots.collect();
        TemplateEvaluator::new(&self.code, slots?, limits, strftime_now).render()
    }
}

/// Returns the value of a name before the template assigns it: a variable, or else a function of the
/// environment.
fn initial_value(name: &str, variables: &Map<String, Value>) -> JinjaResult<Option<JinjaValue>> {
    if name == "self" {
        return Ok(Some(JinjaValue::TemplateBlocks));
    }
    match variables.get(name) {
        Some(value) => json_input::value_of_json(value).map(Some),
        None => Ok(BuiltinFunction::find(name).map(JinjaValue::Function)),
    }
}
