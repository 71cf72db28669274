//! Time that the tool-call and reasoning parsers take for adversarial model outputs of 1 MiB.

use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use text::{
    CallEnforcement, OutputParser, OutputPieces, ReasoningFamily, ReasoningParserOptions,
    ReasoningStart, ToolCallParserOptions, ToolCallSyntax, ToolDefinition,
};

const BYTES: usize = 1 << 20;
const ROUNDS: usize = 5;

/// A model output whose parsing takes more time than that of usual outputs: `begin`, then repetitions of
/// `unit`.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct HostileOutput {
    begin: &'static str,
    /// Text that is repeated after `begin` until the output has the requested length.
    unit: &'static str,
}

const HOSTILE: &[HostileOutput] = &[
    HostileOutput { begin: "", unit: "plain words and no marks at all. " },
    HostileOutput { begin: "", unit: "<tool_call>" },
    HostileOutput { begin: "", unit: "<tool_cal" },
    HostileOutput { begin: "", unit: "<tool_call>{\"name\": \"time\", \"arguments\": {" },
    HostileOutput { begin: "", unit: "<tool_call>{\"name\": \"time\"}</tool_call>" },
    HostileOutput {
        begin: "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": \"",
        unit: "endless ",
    },
    HostileOutput {
        begin: "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": [",
        unit: "[],",
    },
    HostileOutput { begin: "<tool_call>{\"name\": \"time\", \"arguments\": {\"a\": ", unit: "[" },
    HostileOutput { begin: "<tool_call>{\"arguments\": {\"a\": \"", unit: "\\u00e9" },
    HostileOutput { begin: "<tool_call>", unit: " " },
    HostileOutput { begin: "", unit: "{\"name\": \"time\", \"parameters\": {}};" },
    HostileOutput { begin: "{\"name\": \"time\", \"parameters\": {\"a\": \"", unit: "endless " },
    HostileOutput { begin: "", unit: "[TOOL_CALLS]" },
    HostileOutput { begin: "", unit: "[TOOL_CALL" },
    HostileOutput { begin: "", unit: "[TOOL_CALLS]time{}" },
    HostileOutput { begin: "", unit: "[TOOL_CALLS]time[CALL_ID]a[ARGS]{" },
    HostileOutput { begin: "[TOOL_CALLS][", unit: "{\"name\": \"time\", \"arguments\": {}}," },
    HostileOutput { begin: "", unit: "<function=time><parameter=a>" },
    HostileOutput { begin: "<function=time>", unit: "<parameter=a>" },
    HostileOutput { begin: "<function=time>", unit: "<parameter=city>\n\n" },
    HostileOutput { begin: "<function=time><parameter=days>", unit: "1" },
    HostileOutput { begin: "<function=time><parameter=city>", unit: "</paramete" },
    HostileOutput { begin: "", unit: "<function=time></function>" },
    HostileOutput { begin: "", unit: "<｜tool▁calls▁begin｜>" },
    HostileOutput { begin: "", unit: "<｜tool▁call▁begin｜>" },
    HostileOutput { begin: "", unit: "<｜tool▁call▁begin" },
    HostileOutput {
        begin: "",
        unit: "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    },
    HostileOutput {
        begin: "",
        unit: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>",
    },
    HostileOutput { begin: "<｜tool▁call▁begin｜>time<｜tool▁sep｜>", unit: "{\"a\":" },
    HostileOutput { begin: "", unit: "</thin" },
    HostileOutput { begin: "", unit: "<think>" },
    HostileOutput { begin: "", unit: "<|start|>assistant to=functions.x" },
    HostileOutput { begin: "", unit: "<|channel|>final<|message|>a<|end|>" },
    HostileOutput {
        begin: "",
        unit: "<|channel|>commentary to=functions.time<|message|>{}<|call|>",
    },
    HostileOutput { begin: "<|channel|>commentary to=functions.time<|message|>", unit: "{\"a\":" },
    HostileOutput { begin: "", unit: "time\n" },
    HostileOutput { begin: "", unit: " " },
];

#[test]
#[ignore = "measures times: `just hostile-outputs`"]
fn hostile_outputs_parse_in_linear_time() {
    println!(
        "Milliseconds of processor time for 1 MiB, least of {ROUNDS}; slowest output of {}",
        HOSTILE.len()
    );
    println!("| parser | at once | a character at a time | at once: 1 MiB / 256 KiB | slowest |");
    println!("|---|---:|---:|---:|---|");
    for syntax in ToolCallSyntax::all() {
        let slowest = |whole: bool| {
            HOSTILE.iter().map(|output| (parse_time(syntax, output, BYTES, whole), output)).max()
        };
        let (at_once, output) = slowest(true).unwrap();
        let (by_char, _) = slowest(false).unwrap();
        let growth =
            at_once.as_secs_f64() / parse_time(syntax, output, BYTES / 4, true).as_secs_f64();
        let [at_once, by_char] = [at_once, by_char].map(|time| time.as_secs_f64() * 1e3);
        let HostileOutput { begin, unit } = output;
        println!(
            "| {syntax:?} | {at_once:.1} | {by_char:.1} | {growth:.1} | `{begin}` and `{unit:?}` repeated |"
        );
    }
}

/// Parses one output several times with a tool-call parser and the reasoning parser; returns the shortest
/// processor time.
fn parse_time(
    syntax: ToolCallSyntax,
    output: &HostileOutput,
    bytes: usize,
    whole: bool,
) -> Duration {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "a": {"type": "array"}}});
    let tools: Arc<[ToolDefinition]> =
        [ToolDefinition { name: "time".to_owned(), parameters, is_strict: false }].into();
    let HostileOutput { begin, unit } = output;
    let text = format!("{begin}{}", unit.repeat(bytes.div_ceil(unit.len())));
    let family = ReasoningFamily::QWEN3;
    let reasoning = ReasoningParserOptions { family, start: ReasoningStart::AtMarker };
    let round = |_| {
        let calls = Some(ToolCallParserOptions {
            syntax,
            tools: &tools,
            max_calls: u32::MAX,
            enforcement: CallEnforcement::None,
        });
        let mut parser = OutputParser::new(Some(reasoning), calls);
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
        // Harmony drops an incomplete header at the end of the output.
        let is_header = syntax == ToolCallSyntax::HARMONY && unit.starts_with("<|start|>");
        let has_text = shown + pieces.len() > 0;
        assert_eq!(has_text, !is_header, "{syntax:?}: text of {begin:?} and {unit:?} repeated");
        took
    };
    (0..ROUNDS).map(round).min().unwrap()
}

/// Processor time that this thread has used so far.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}
