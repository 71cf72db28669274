//! Time of the tool-call and reasoning parsers for hostile outputs of one megabyte.

use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use text::{
    OutputParser, OutputPieces, ReasoningStart, ToolCallRules, ToolCallSyntax, ToolDefinition,
};

const BYTES: usize = 1 << 20;
const ROUNDS: usize = 5;

/// Start of an output, and the string that it then repeats.
const HOSTILE: &[(&str, &str)] = &[
    ("", "plain words and no marks at all. "),
    ("", "<tool_call>"),
    ("", "<tool_cal"),
    ("", "<tool_call>{\"name\": \"time\", \"arguments\": {"),
    ("", "<tool_call>{\"name\": \"time\"}</tool_call>"),
    ("<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": \"", "endless "),
    ("<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": [", "[],"),
    ("<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": ", "["),
    ("<tool_call>{\"arguments\": {\"a\": \"", "\\u00e9"),
    ("<tool_call>", " "),
    ("", "{\"name\": \"time\", \"parameters\": {}};"),
    ("{\"name\": \"time\", \"parameters\": {\"a\": \"", "endless "),
    ("", "[TOOL_CALLS]"),
    ("", "[TOOL_CALL"),
    ("", "[TOOL_CALLS]time{}"),
    ("", "[TOOL_CALLS]time[CALL_ID]a[ARGS]{"),
    ("[TOOL_CALLS][", "{\"name\": \"time\", \"arguments\": {}},"),
    ("", "<function=time><parameter=a>"),
    ("<function=time>", "<parameter=a>"),
    ("<function=time>", "<parameter=city>\n\n"),
    ("<function=time><parameter=days>", "1"),
    ("<function=time><parameter=city>", "</paramete"),
    ("", "<function=time></function>"),
    ("", "<｜tool▁calls▁begin｜>"),
    ("", "<｜tool▁call▁begin｜>"),
    ("", "<｜tool▁call▁begin"),
    ("", "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>"),
    ("<｜tool▁call▁begin｜>time<｜tool▁sep｜>", "{\"a\":"),
    ("", "</thin"),
    ("", "<think>"),
    ("", " "),
];

const SYNTAXES: [ToolCallSyntax; 6] = [
    ToolCallSyntax::Hermes,
    ToolCallSyntax::Qwen3Coder,
    ToolCallSyntax::Llama3Json,
    ToolCallSyntax::Mistral,
    ToolCallSyntax::DeepSeekV3,
    ToolCallSyntax::DeepSeekV31,
];

#[test]
#[ignore = "a measurement; run it alone"]
fn hostile_outputs_parse_in_linear_time() {
    println!(
        "Milliseconds of processor time for 1 MiB, least of {ROUNDS}; slowest output of {}",
        HOSTILE.len()
    );
    println!("| parser | at once | a character at a time | at once: 1 MiB / 256 KiB | slowest |");
    println!("|---|---:|---:|---:|---|");
    for syntax in SYNTAXES {
        let slowest = |whole: bool| {
            HOSTILE.iter().map(|output| (took(syntax, output, BYTES, whole), output)).max()
        };
        let (at_once, output) = slowest(true).unwrap();
        let (by_char, _) = slowest(false).unwrap();
        let growth = at_once.as_secs_f64() / took(syntax, output, BYTES / 4, true).as_secs_f64();
        let [at_once, by_char] = [at_once, by_char].map(|took| took.as_secs_f64() * 1e3);
        let (begins, unit) = output;
        println!(
            "| {syntax:?} | {at_once:.1} | {by_char:.1} | {growth:.1} | `{begins}` and `{unit:?}` for ever |"
        );
    }
}

/// Minimum time over some rounds of one parser for one output, with the reasoning parser.
fn took(
    syntax: ToolCallSyntax,
    (begins, unit): &(&str, &str),
    bytes: usize,
    whole: bool,
) -> Duration {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "a": {"type": "array"}}});
    let tools: Arc<[ToolDefinition]> =
        [ToolDefinition { name: "time".to_owned(), parameters }].into();
    let text = format!("{begins}{}", unit.repeat(bytes.div_ceil(unit.len())));
    let round = |_| {
        let calls = Some(ToolCallRules { syntax, tools: &tools, max_calls: u32::MAX });
        let mut parser = OutputParser::new(Some(ReasoningStart::AtMarker), calls);
        let (mut pieces, mut shown, start) = (OutputPieces::default(), 0, processor_time());
        if whole {
            parser.push(&text, &mut pieces);
        } else {
            let mut at = 0;
            for c in text.chars() {
                parser.push(&text[at..at + c.len_utf8()], &mut pieces);
                at += c.len_utf8();
                shown += pieces.len();
                pieces.clear();
            }
        }
        parser.finish(&mut pieces);
        let took = processor_time().saturating_sub(start);
        assert!(shown + pieces.len() > 0, "something is told");
        took
    };
    (0..ROUNDS).map(round).min().unwrap()
}

/// Processor time of this thread so far.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}
