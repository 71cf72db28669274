//! Forced tool calls: the grammar of each tool call syntax is used to generate random outputs. The parser
//! must split each output into complete calls, whose arguments must satisfy the schema.

use super::random_output::RandomOutputGenerator;
use super::{added, byte_level, load};
use crate::{
    CallEnforcement, CallGrammarError, OutputParser, OutputPiece, OutputPieces, Tokenizer,
    ToolCallParserOptions, ToolCallSyntax, ToolDefinition,
};
use grammar::{GrammarCompiler, GrammarSpec, OutputConstraint};
use serde_json::{Value, json};
use std::sync::Arc;

/// Texts that close open strings, lists, objects and parameters; a random output appends them so that it
/// ends.
const JSON_ENDS: &[&str] = &["\"", "a\"", "]", "}", ")"];
const DELIMITED_ENDS: &[&str] = &["<escape>", "<|\"|>", "]", "}", "<end_function_call>"];
const HARMONY_ENDS: &[&str] = &["\"", "a\"", "]", "}", ")", "<|end|>"];
const TAG_ENDS: &[&str] =
    &["\n</parameter>", "</parameter>", "</arg_value>", "</｜DSML｜parameter>", "\"", "]", "}"];

/// Schemas of a property `v`; their `$ref` references refer to the definitions in `object_schemas`.
fn value_schemas() -> Vec<Value> {
    vec![
        json!({"type": "string"}),
        json!({}),
        json!({"type": "string", "enum": ["red", "blue </b>", "a\"b\\", ""]}),
        json!({"$ref": "#/$defs/colour"}),
        json!({"allOf": [{"$ref": "#/$defs/colour"}], "default": "red"}),
        json!({"const": "fast"}),
        json!({"type": "string", "pattern": "^[0-9]{5}$"}),
        json!({"type": "string", "pattern": "^(a|b/)+$|^x\\w*$"}),
        json!({"type": "string", "pattern": "[a-z\\d]"}),
        json!({"type": "string", "minLength": 2, "maxLength": 4}),
        json!({"type": "string", "format": "date"}),
        json!({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}),
        json!({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "integer"}, {"type": "boolean"}]}),
        json!({"type": ["string", "number", "null"]}),
        json!({"enum": ["a", 7, null, true, "true"]}),
        json!({"oneOf": [{"const": "x"}, {"const": "y"}]}),
        json!({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"type": "string", "maxLength": 3}}]}),
        json!({"type": "boolean"}),
        json!({"type": "null"}),
        json!({"type": "integer", "minimum": -3, "maximum": 12}),
        json!({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}),
        json!({"enum": [1, 2, "three"]}),
        json!({"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 1, "maxItems": 2}),
        json!({"type": "object", "additionalProperties": false, "required": ["a"], "properties": {
            "a": {"type": "string", "pattern": "^</?[pa]"}, "b": {"$ref": "#/$defs/pair"}}}),
        json!({"$ref": "#/$defs/tree"}),
        json!({"$ref": "#/properties/first"}),
    ]
}

/// Schemas of complete argument objects.
pub(super) fn object_schemas() -> Vec<Value> {
    let definitions = json!({
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": false, "minItems": 2},
        "tree": {"type": "object", "additionalProperties": false, "required": ["name"], "properties": {
            "name": {"type": "string", "maxLength": 3}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}},
    });
    let mut schemas: Vec<Value> = value_schemas()
        .into_iter()
        .map(|schema| {
            json!({"type": "object", "additionalProperties": false, "required": ["first", "v"],
                "properties": {"first": {"type": "integer", "maximum": 9, "minimum": 0}, "v": schema,
                    "last": {"type": "boolean"}},
                "$defs": definitions})
        })
        .collect();
    schemas.extend([
        json!({"type": "object", "properties": {}, "additionalProperties": false}),
        json!({"properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a", "b"],
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}}),
        json!({"type": "object", "$ref": "#/$defs/tree", "$defs": definitions}),
        json!({"anyOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["kind", "n"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "b"}, "s": {"type": "string", "maxLength": 3}}, "required": ["kind", "s"], "additionalProperties": false},
        ]}),
    ]);
    schemas
}

/// Returns a tokenizer. If `has_special`, the markers of `syntax` are special tokens, otherwise they are not
/// in the vocabulary.
fn tokenizer(syntax: ToolCallSyntax, has_special: bool) -> Arc<Tokenizer> {
    let mut files = byte_level();
    if has_special {
        let tokens = files.tokenizer["added_tokens"].as_array_mut().unwrap();
        for marker in syntax.special_markers() {
            let id = tokens.iter().filter_map(|token| token["id"].as_u64()).max().unwrap() + 1;
            tokens.push(added(id as usize, marker, true));
        }
    }
    Arc::new(load(&files).1)
}

/// Returns the arguments of the calls in an output that consists only of calls.
///
/// Errors: the part of the output that is not a complete call.
fn calls(
    syntax: ToolCallSyntax,
    tools: &Arc<[ToolDefinition]>,
    output: &str,
) -> Result<Vec<String>, String> {
    let enforcement = CallEnforcement::AllTools;
    let options = ToolCallParserOptions { syntax, tools, max_calls: u32::MAX, enforcement };
    let (mut parser, mut pieces) =
        (OutputParser::new(None, Some(options)), OutputPieces::default());
    parser.push(output, &mut pieces);
    parser.finish(&mut pieces);
    let (mut calls, mut arguments) = (Vec::new(), String::new());
    for piece in pieces.iter() {
        match piece {
            OutputPiece::Call { name: "f", .. } => {}
            OutputPiece::Arguments { text, .. } => arguments.push_str(text),
            OutputPiece::End { .. } => calls.push(std::mem::take(&mut arguments)),
            other => return Err(format!("{other:?}")),
        }
    }
    Ok(calls)
}

/// Test harness for tool calls that a grammar enforces, in one tool call syntax: a tokenizer, and a compiler
/// of the grammars.
pub(super) struct ForcedCallHarness {
    pub syntax: ToolCallSyntax,
    pub tokenizer: Arc<Tokenizer>,
    pub compiler: GrammarCompiler,
}

impl ForcedCallHarness {
    pub(super) fn new(syntax: ToolCallSyntax, has_special: bool) -> Self {
        let tokenizer = tokenizer(syntax, has_special);
        let compiler = GrammarCompiler::new(tokenizer.grammar_vocabulary()).unwrap();
        Self { syntax, tokenizer, compiler }
    }

    fn random(&self, seed: u64) -> RandomOutputGenerator<'_> {
        RandomOutputGenerator {
            tokenizer: &self.tokenizer,
            ends: self.ends().to_vec(),
            stop_chance: 2,
            stops_after: usize::MAX,
            start: "",
            prefers_special: true,
            seed,
        }
    }

    pub(super) fn ends(&self) -> &'static [&'static str] {
        match self.syntax.name() {
            "functiongemma" | "gemma4" => DELIMITED_ENDS,
            "harmony" => HARMONY_ENDS,
            "qwen3_coder" | "seed_oss" | "minimax_m2" | "glm45" | "glm47" | "deepseek_v32" => {
                TAG_ENDS
            }
            _ => JSON_ENDS,
        }
    }

    /// Generates random calls of a tool with the parameter schema `schema`, and checks that the parsed
    /// arguments satisfy the schema.
    fn check(&self, schema: &Value, seed: u64) -> Result<(), String> {
        let tool =
            ToolDefinition { name: "f".to_owned(), parameters: schema.clone(), is_strict: false };
        let tools: Arc<[ToolDefinition]> = [tool].into();
        let grammar = self.syntax.grammar(tools.iter(), true, &self.tokenizer);
        let grammar = grammar.map_err(|error| error.to_string())?;
        let constraint = OutputConstraint::new(GrammarSpec::Lark(grammar.clone()), "tools");
        let compiled = self
            .compiler
            .dry_run(&constraint)
            .and_then(|report| self.compiler.compile(&constraint, report));
        let compiled = compiled.map_err(|error| format!("{error} in {grammar}"))?;
        let valid = jsonschema::validator_for(schema).unwrap();
        for seed in [seed, seed + 1] {
            let mut session = compiled.session_seed(false).session();
            let output = self.random(seed).output(&mut session)?;
            let calls =
                calls(self.syntax, &tools, &output).map_err(|e| format!("{e} {output:?}"))?;
            let parsed = calls.iter().map(|arguments| match serde_json::from_str(arguments) {
                // A generated number may exceed the range of a double.
                Err(error) if error.to_string().contains("out of range") => true,
                result => result.is_ok_and(|arguments| valid.is_valid(&arguments)),
            });
            if calls.is_empty() || !parsed.fold(true, |all, one| all & one) {
                return Err(format!("{calls:?} in {output:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn arguments_of_forced_calls_match_the_schema() {
    let mut failures = Vec::new();
    for syntax in ToolCallSyntax::all() {
        for has_special in [false, true] {
            let forced = ForcedCallHarness::new(syntax, has_special);
            for (number, schema) in object_schemas().iter().enumerate() {
                if let Err(error) = forced.check(schema, number as u64 * 7) {
                    failures.push(format!("{syntax:?} {has_special} {schema}: {error}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn schemas_that_tags_cannot_express_are_rejected() {
    let tokenizer = tokenizer(ToolCallSyntax::GLM45, false);
    let grammar = |parameters: Value| {
        let tool = ToolDefinition { name: "f".to_owned(), parameters, is_strict: false };
        ToolCallSyntax::GLM45.grammar([&tool], false, &tokenizer)
    };
    let unsupported =
        |keyword| CallGrammarError::UnsupportedKeyword { tool: "f".to_owned(), keyword };
    let related = json!({"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}});
    assert_eq!(grammar(related), Err(unsupported("dependentRequired")));
    let overlapping = json!({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]});
    assert_eq!(grammar(overlapping), Err(unsupported("oneOf")));
    let conditional = json!({"properties": {"a": {"type": "string", "if": {}}}});
    assert_eq!(grammar(conditional), Err(unsupported("if")));
    let key = CallGrammarError::UnsupportedKey { tool: "f".to_owned(), key: "a\nb".to_owned() };
    assert_eq!(grammar(json!({"properties": {"a\nb": {}}, "required": ["a\nb"]})), Err(key));
    assert!(grammar(json!({"properties": {"a\nb": {}}})).is_ok());
    let none = json!({"properties": {"a": {"enum": ["x"], "type": "integer"}}, "required": ["a"]});
    assert!(matches!(grammar(none), Err(CallGrammarError::UnsupportedKey { .. })));
    let no_object = CallGrammarError::NoObject { tool: "f".to_owned() };
    assert_eq!(grammar(json!({"type": "string"})), Err(no_object));
}

/// Returns the grammar of calls of the tool `f`.
fn forced_grammar(syntax: ToolCallSyntax, parameters: Value) -> Result<String, CallGrammarError> {
    let tool = ToolDefinition { name: "f".to_owned(), parameters, is_strict: false };
    syntax.grammar([&tool], false, &tokenizer(syntax, false))
}

/// Returns definitions each of which refers to the next one a hundred times; the last definition is `last`.
fn branching_definitions(kind: &Value, last: &Value) -> Value {
    let choices = |next: usize| vec![json!({"$ref": format!("#/$defs/d{next}")}); 100];
    let mut definitions = json!({"d7": last});
    for at in 0..7 {
        definitions[format!("d{at}")] = json!({"type": kind, "anyOf": choices(at + 1)});
    }
    definitions
}

#[test]
fn exponential_references_are_rejected() {
    let unsupported =
        |keyword| CallGrammarError::UnsupportedKeyword { tool: "f".to_owned(), keyword };
    let text = json!({"type": "string"});
    let definitions = branching_definitions(&json!("object"), &text);
    let schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
    for syntax in [
        ToolCallSyntax::QWEN3_CODER,
        ToolCallSyntax::GLM45,
        ToolCallSyntax::PYTHONIC,
        ToolCallSyntax::GEMMA4,
    ] {
        assert_eq!(forced_grammar(syntax, schema.clone()), Err(unsupported("$ref")));
    }
    let definitions = branching_definitions(&json!(["array", "object"]), &json!({"type": "array"}));
    let schema = json!({"properties": {"v": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    assert_eq!(forced_grammar(ToolCallSyntax::GEMMA4, schema), Err(CallGrammarError::TooLong));
}

#[test]
fn long_grammars_are_rejected() {
    let names: Vec<String> = (0..1_000).map(|at| format!("{at}")).collect();
    let properties: Value =
        names.iter().map(|name| (name.clone(), json!({"$ref": "#/$defs/big"}))).collect();
    let big = json!({"type": "integer", "enum": (0..5_000).collect::<Vec<_>>()});
    let schema = json!({"properties": properties, "$defs": {"big": big}});
    for syntax in [ToolCallSyntax::GEMMA4, ToolCallSyntax::GLM45, ToolCallSyntax::PYTHONIC] {
        assert_eq!(forced_grammar(syntax, schema.clone()), Err(CallGrammarError::TooLong));
    }
    let one_of = |count: usize, bytes: usize| {
        let pattern = |at: usize| json!({"pattern": format!("^{at:0>bytes$}$")});
        json!({"type": "string", "oneOf": (0..count).map(pattern).collect::<Vec<_>>()})
    };
    let long = json!({"type": "string", "pattern": "x".repeat(70 << 10)});
    for (schema, keyword) in
        [(one_of(255, 32 << 10), "oneOf"), (one_of(60, 100), "oneOf"), (long, "pattern")]
    {
        let error = forced_grammar(ToolCallSyntax::GLM45, json!({"properties": {"a": schema}}));
        let expected = CallGrammarError::UnsupportedKeyword { tool: "f".to_owned(), keyword };
        assert_eq!(error, Err(expected));
    }
}

#[test]
fn lists_end_before_an_item_without_values() {
    let list = json!({"type": "array", "prefixItems": [{"type": "integer"}, false]});
    let grammar = forced_grammar(ToolCallSyntax::GEMMA4, json!({"properties": {"v": list}}));
    let grammar = grammar.unwrap();
    assert!(grammar.contains("value_0_0: \"[\" value_0_1  \"]\"\n"), "{grammar}");
}
