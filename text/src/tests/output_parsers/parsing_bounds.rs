//! Tests that output is parsed in bounded time and memory.

use super::*;

#[test]
fn calls_beyond_the_limit_are_dropped() {
    let text = "<tool_call>{\"name\": \"time\"}</tool_call> <tool_call>{\"name\": \"weather\"}</tool_call>";
    let pieces = run(parser(ToolCallSyntax::HERMES, None, 1), [text]);
    assert_eq!(show(&pieces, text), "call 0 time\n  0 {}\nend 0\n");
}

/// Outputs that never become a tool call: the size of the held-back text is bounded, regardless of the output
/// length.
#[test]
fn held_back_output_is_bounded() {
    const HELD_BACK_MAX: usize = 256 << 10;
    for (syntax, prefix, unit) in [
        (ToolCallSyntax::HERMES, "<tool_call>", " "),
        (ToolCallSyntax::HERMES, "<tool_call>{", "\n"),
        (ToolCallSyntax::HERMES, "<tool_call>{\"arguments\": {\"a\": \"", "x"),
        (ToolCallSyntax::HERMES, "<tool_call>{\"id\": \"x\"", " "),
        (ToolCallSyntax::QWEN3_CODER, "<tool_call>", " "),
        (ToolCallSyntax::QWEN3_CODER, "<function=", "x"),
        (ToolCallSyntax::LLAMA3_JSON, "", " "),
        (ToolCallSyntax::LLAMA3_JSON, "<|python_tag|>", " "),
        (ToolCallSyntax::LLAMA3_JSON, "{", " "),
        (ToolCallSyntax::LLAMA3_JSON, "{\"name\": \"time\"};", ";"),
        (ToolCallSyntax::MISTRAL, "[TOOL_CALLS]", " "),
        (ToolCallSyntax::MISTRAL, "[TOOL_CALLS] [", " "),
        (ToolCallSyntax::MISTRAL, "[TOOL_CALLS]", "x"),
        (ToolCallSyntax::DEEPSEEK_V3, "", "<｜tool▁calls▁begin｜>"),
        (ToolCallSyntax::DEEPSEEK_V3, "<｜tool▁calls▁begin｜>", " "),
        (ToolCallSyntax::DEEPSEEK_V3, "<｜tool▁call▁begin｜>", "x"),
        (ToolCallSyntax::DEEPSEEK_V31, "<｜tool▁call▁begin｜>", " "),
        (ToolCallSyntax::KIMI_K2, "<|tool_call_begin|>", "x"),
        (ToolCallSyntax::GLM45, "<tool_call>", "x"),
        (ToolCallSyntax::MINIMAX_M2, "<minimax:tool_call>", "\n"),
        (ToolCallSyntax::DEEPSEEK_V32, "<｜DSML｜invoke name=\"", "x"),
        (ToolCallSyntax::PYTHONIC, "[", " "),
        (ToolCallSyntax::PYTHONIC, "[", "x"),
        (ToolCallSyntax::PYTHONIC, "<|python_start|>", " "),
        (ToolCallSyntax::OLMO3, "<function_calls>", "\n"),
        (ToolCallSyntax::GRANITE, "<tool_call>", " "),
        (ToolCallSyntax::GRANITE, "[{\"arguments\": {\"a\": \"", "x"),
        (ToolCallSyntax::XLAM, "```json", "\n"),
        (ToolCallSyntax::HARMONY, "", " "),
        (ToolCallSyntax::HARMONY, "<|channel|>", "x"),
        (ToolCallSyntax::HARMONY, "<|channel|>", "<|channel|>"),
        (ToolCallSyntax::HARMONY, "<|channel|>final", "<|constrain|>"),
        (ToolCallSyntax::HARMONY, "<|channel|>commentary to=functions.time<|message|>", " "),
    ] {
        let (mut parser, mut pieces) = (parser(syntax, None, u32::MAX), OutputPieces::default());
        let (mut read, mut emitted, mut held_back_max) = (0, 0, 0);
        while read < 1 << 20 {
            let part = if read == 0 { prefix } else { unit };
            parser.push(part, &mut pieces);
            read += part.len().max(1);
            let content =
                |piece| if let OutputPiece::Content(text) = piece { text.len() } else { 0 };
            emitted += pieces.iter().map(content).sum::<usize>();
            pieces.clear();
            held_back_max = held_back_max.max(read - read.min(emitted));
        }
        assert!(
            held_back_max < HELD_BACK_MAX,
            "{syntax:?} {prefix:?} {unit:?} holds {held_back_max} bytes"
        );
    }
}

/// The schema of an argument is evaluated once, however often the argument occurs.
#[test]
fn long_tool_schema_is_read_once() {
    let values: Vec<String> = (0..100_000).map(|i| format!("v{i}")).collect();
    let schema = json!({"properties": {"a": {"enum": values}, "n": {"enum": [1, 2]}}});
    let tools: Arc<[ToolDefinition]> =
        [ToolDefinition { name: "x".to_owned(), parameters: schema, is_strict: false }].into();
    let syntax = ToolCallSyntax::QWEN3_CODER;
    let enforcement = CallEnforcement::None;
    let rules = ToolCallParserOptions { syntax, tools: &tools, max_calls: u32::MAX, enforcement };
    let mut parser = OutputParser::new(None, Some(rules));
    let text = format!("<function=x>{}<parameter=n>2", "<parameter=a>v7".repeat(60_000));
    let mut pieces = OutputPieces::default();
    let start = processor_time();
    parser.push(&text, &mut pieces);
    // Evaluating the 100,000 values of the schema for each of the 60,000 arguments would take minutes.
    assert!(processor_time().saturating_sub(start) < Duration::from_secs(5));
    let Some(OutputPiece::Arguments { text, .. }) = pieces.iter().last() else {
        panic!("no arguments")
    };
    assert!(text.starts_with("{\"a\": \"v7\", \"a\": \"v7\"") && text.ends_with("\"n\": "));
}

/// Returns the CPU time used by this thread.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn megabyte_output_parses_fast_in_bounded_memory() {
    let units = [
        "<tool_call>",
        "<tool_cal",
        "<tool_call>{\"name\": \"time\", \"arguments\": {",
        "[",
        "{",
        "\"",
        "<function=x>",
        "<parameter=a>",
        "<parameter=a>\n\n",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]a",
        " ",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<minimax:tool_call>",
        "<invoke name=\"a\">",
        "<tool_call>time<arg_key>a</arg_key>",
        "<｜DSML｜invoke name=\"a\">",
        "[time(",
        "[time(a=[",
        "```json [",
        "time\n",
        "time\n{",
        "<|assistant|>",
        "<|tool_call_begin|>functions.time:0",
        "</thin",
        "<think>",
        "<|start|>",
        "<|start|>assistant to=functions.x",
        "<|channel|>commentary to=functions.x<|message|>",
        "<|channel|>commentary to=functions.x<|message|>{",
        "<|channel|>final<|message|>a<|end|>",
    ];
    let mut worst = Duration::ZERO;
    for unit in units {
        for syntax in ToolCallSyntax::all() {
            let text = unit.repeat((1 << 20) / unit.len());
            let mut parser = parser(syntax, Some(ReasoningStart::AtMarker), u32::MAX);
            let (mut pieces, start) = (OutputPieces::default(), processor_time());
            parser.push(&text, &mut pieces);
            parser.finish(&mut pieces);
            let took = processor_time().saturating_sub(start);
            // `tests/bench/output_parsers.rs` measures a release build on an idle CPU. Here the limit is so
            // generous that only a parser with non-linear time exceeds it, regardless of the build profile
            // and the machine load.
            assert!(took < Duration::from_secs(5), "{syntax:?} {unit:?} took {took:?}");
            worst = worst.max(took);
        }
    }
    println!("the worst took {worst:?}");
}
