//! Fuzz target: parsers of model output (reasoning and tool calls), which receive the whole text at once and
//! also in chunks. Two bytes of the input select the parser and the chunk boundaries.

use serde_json::json;
use std::sync::Arc;
use text::{
    CallEnforcement, OutputParser, OutputPieces, ReasoningFamily, ReasoningParserOptions,
    ReasoningStart, ToolCallParserOptions, ToolCallSyntax, ToolDefinition,
};

pub(crate) fn run(data: &[u8]) {
    let [choice, stride, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let syntaxes = ToolCallSyntax::all();
    let syntax = syntaxes[usize::from(*choice) % syntaxes.len()];
    let begins = [
        None,
        Some(ReasoningStart::AtMarker),
        Some(ReasoningStart::Inside),
        Some(ReasoningStart::After),
    ][usize::from(*choice) / syntaxes.len() % 4];
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "a": {"type": "array"}}});
    let tools: Arc<[ToolDefinition]> =
        [ToolDefinition { name: "time".to_owned(), parameters, is_strict: false }].into();
    let read = |stride: usize| {
        let rules = ToolCallParserOptions {
            syntax,
            tools: &tools,
            max_calls: u32::MAX,
            enforcement: CallEnforcement::None,
        };
        let reasoning =
            begins.map(|start| ReasoningParserOptions { family: ReasoningFamily::QWEN3, start });
        let mut parser = OutputParser::new(reasoning, Some(rules));
        let (mut pieces, mut from) = (OutputPieces::default(), 0);
        while from < text.len() {
            let mut to = text.len().min(from + stride);
            while !text.is_char_boundary(to) {
                to += 1;
            }
            parser.push(&text[from..to], &mut pieces);
            from = to;
        }
        parser.finish(&mut pieces);
        pieces
    };
    let whole = read(usize::MAX - text.len());
    assert_eq!(whole, read(1 + usize::from(*stride % 32)), "other chunks give another result");
}
