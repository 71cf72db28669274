//! Calls of strict tools when the model may choose not to call a tool: the grammar of each tool call syntax
//! is used to generate random outputs. The parser must split each output into content and complete calls, and
//! the arguments of strict tools must satisfy the schema.

use super::forced_calls::{ForcedCallHarness, object_schemas};
use super::random_output::RandomOutputGenerator;
use crate::{
    CallEnforcement, OutputParser, OutputPiece, OutputPieces, ToolCallParserOptions,
    ToolCallSyntax, ToolDefinition,
};
use grammar::{GrammarSpec, OutputConstraint};
use protocol::Token;
use serde_json::{Value, json};
use std::sync::Arc;

/// Content and calls of one output.
#[derive(Debug, Default)]
struct ParsedOutput {
    content: String,
    calls: Vec<NamedCall>,
}

/// Tool call with its function name and arguments.
#[derive(Debug)]
struct NamedCall {
    name: String,
    arguments: String,
}

fn parsed(
    syntax: ToolCallSyntax,
    tools: &Arc<[ToolDefinition]>,
    output: &str,
) -> Result<ParsedOutput, String> {
    let enforcement = CallEnforcement::StrictTools;
    let options = ToolCallParserOptions { syntax, tools, max_calls: u32::MAX, enforcement };
    let mut parser = OutputParser::new(None, Some(options));
    let (mut pieces, mut parsed) = (OutputPieces::default(), ParsedOutput::default());
    parser.push(output, &mut pieces);
    parser.finish(&mut pieces);
    for piece in pieces.iter() {
        match piece {
            OutputPiece::Content(text) => parsed.content.push_str(text),
            OutputPiece::Call { name, .. } => {
                parsed.calls.push(NamedCall { name: name.to_owned(), arguments: String::new() });
            }
            OutputPiece::Arguments { text, .. } => {
                parsed.calls.last_mut().unwrap().arguments.push_str(text);
            }
            OutputPiece::End { .. } => {}
            other => return Err(format!("{other:?}")),
        }
    }
    Ok(parsed)
}

/// Text with which a call can begin.
fn opening(syntax: ToolCallSyntax) -> &'static str {
    match syntax.name() {
        "granite" => "<tool_call>",
        "phi4_mini_json" => "functools",
        "xlam" => "[{\"name\": \"",
        "llama3_json" => "{\"name\": \"",
        "pythonic" => "[f(",
        "glm4" => "f\n{",
        "harmony" => "<|channel|>commentary to=functions.f",
        _ => syntax.opening_marker().unwrap(),
    }
}

/// Generates outputs with a strict tool `f` and a non-strict tool `g`, and checks their calls. Returns the
/// number of calls of `f`.
fn check(forced: &ForcedCallHarness, schema: &Value, seed: u64) -> Result<usize, String> {
    let loose = json!({"type": "object", "properties": {"a": {"type": "array"}, "b": {}},
        "dependentRequired": {"a": ["b"]}});
    let tools: Arc<[ToolDefinition]> = [
        ToolDefinition { name: "f".to_owned(), parameters: schema.clone(), is_strict: true },
        ToolDefinition { name: "g".to_owned(), parameters: loose, is_strict: false },
    ]
    .into();
    let ForcedCallHarness { syntax, tokenizer, compiler } = forced;
    let grammar = syntax.free_grammar(tools.iter(), true, tokenizer);
    let grammar = grammar.map_err(|error| error.to_string())?;
    let constraint = OutputConstraint::new(GrammarSpec::Lark(grammar.clone()), "tools");
    let report = compiler.dry_run(&constraint).map_err(|e| format!("{e} in {grammar}"))?;
    let compiled = compiler.compile(&constraint, report).map_err(|e| e.to_string())?;
    let valid = jsonschema::validator_for(schema).unwrap();
    let mut count = 0;
    for seed in seed..seed + 2 {
        let start = if seed % 2 == 0 { opening(*syntax) } else { "" };
        let mut ends = vec![opening(*syntax)];
        ends.extend(forced.ends());
        let random = RandomOutputGenerator {
            tokenizer,
            ends,
            stop_chance: 30,
            stops_after: 150,
            start,
            prefers_special: false,
            seed,
        };
        let output = random.output(&mut compiled.session_seed(false).session())?;
        let parsed = parsed(*syntax, &tools, &output).map_err(|e| format!("{e} {output:?}"))?;
        for NamedCall { name, arguments } in &parsed.calls {
            let is_valid = match serde_json::from_str(arguments) {
                Err(error) => error.to_string().contains("out of range"),
                Ok(value) => name == "g" || valid.is_valid(&value),
            };
            if !is_valid || !matches!(name.as_str(), "f" | "g") {
                return Err(format!("{name} {arguments} in {output:?}"));
            }
            count += usize::from(name == "f");
        }
        let has_marker = !matches!(syntax.name(), "xlam" | "llama3_json" | "pythonic" | "glm4");
        if has_marker && parsed.content.contains(opening(*syntax)) {
            return Err(format!("a marker in the content of {output:?}"));
        }
    }
    Ok(count)
}

#[test]
fn free_calls_of_strict_tools_match_the_schema() {
    let mut failures = Vec::new();
    for syntax in ToolCallSyntax::all() {
        for has_special in [false, true] {
            let forced = ForcedCallHarness::new(syntax, has_special);
            let mut calls = 0;
            for (number, schema) in object_schemas().iter().enumerate().step_by(4) {
                match check(&forced, schema, number as u64 * 11) {
                    Ok(count) => calls += count,
                    Err(error) => {
                        failures.push(format!("{syntax:?} {has_special} {schema}: {error}"));
                    }
                }
            }
            if calls == 0 {
                failures.push(format!("{syntax:?} {has_special}: no calls"));
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn loose_pythonic_calls_allow_python_literals() {
    let forced = ForcedCallHarness::new(ToolCallSyntax::PYTHONIC, false);
    let tool = |name: &str, is_strict| {
        let parameters = json!({"type": "object"});
        ToolDefinition { name: name.to_owned(), parameters, is_strict }
    };
    let tools: Arc<[ToolDefinition]> = [tool("f", true), tool("g", false)].into();
    let ForcedCallHarness { syntax, tokenizer, compiler } = &forced;
    let grammar = syntax.free_grammar(tools.iter(), true, tokenizer).unwrap();
    let constraint = OutputConstraint::new(GrammarSpec::Lark(grammar), "tools");
    let report = compiler.dry_run(&constraint).unwrap();
    let compiled = compiler.compile(&constraint, report).unwrap();
    let output = r#"[g(a=True, b='it\'s "', c=[None, {'k': False, "l": -1.5}], d="x", e=7, f=[])]"#;
    let mut session = compiled.session_seed(false).session();
    for (at, &byte) in output.as_bytes().iter().enumerate() {
        let mask = session.mask().unwrap();
        let is_allowed = mask[usize::from(byte) / 32] >> (byte % 32) & 1 == 1;
        assert!(is_allowed, "{:?} after {:?}", char::from(byte), &output[..at]);
        session.advance(&[Token::from(byte)]);
    }
    assert!(session.may_end());
    let calls = parsed(*syntax, &tools, output).unwrap().calls;
    let arguments: Value = serde_json::from_str(&calls[0].arguments).unwrap();
    let expected = json!({"a": true, "b": "it's \"", "c": [null, {"k": false, "l": -1.5}], "d": "x",
        "e": 7, "f": []});
    assert_eq!(arguments, expected);
}
