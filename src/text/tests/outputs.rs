//! Outputs of each family, told apart; the same at any cut; linear in their length.

use crate::text::{Beginning, CallSyntax, OutputParser, Piece, PieceList, Reasoning, Tool};
use expect_test::{Expect, expect};
use proptest::prelude::*;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

fn tools() -> Arc<[Tool]> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}});
    ["weather", "time"]
        .map(|name| Tool { name: name.to_owned(), parameters: parameters.clone() })
        .into()
}

fn parser(syntax: CallSyntax, reasoning: Option<Beginning>, most: u32) -> OutputParser {
    OutputParser::new(reasoning, Some((syntax, &tools(), most)))
}

/// Feeds `text` in the given parts.
fn run<'a>(mut parser: OutputParser, parts: impl IntoIterator<Item = &'a str>) -> PieceList {
    let (mut pieces, mut new) = (PieceList::default(), PieceList::default());
    for part in parts {
        parser.push(part, &mut new);
        pieces.append(&new);
        new.clear();
    }
    parser.finish(&mut new);
    pieces.append(&new);
    pieces
}

/// One line a piece.
fn show(pieces: &PieceList, text: &str) -> String {
    let mut begun = Vec::new();
    let line = |piece: Piece<'_>| match piece {
        Piece::Reasoning(text) => format!("reasoning {text:?}\n"),
        Piece::Content(text) => format!("content {text:?}\n"),
        Piece::Call { index, name, from } => {
            begun.push(from);
            format!("call {index} {name}\n")
        }
        Piece::Arguments { index, text } => format!("  {index} {text}\n"),
        Piece::End { index } => format!("end {index}\n"),
        Piece::Broken { index, to } => {
            format!("broken {index} {:?}\n", &text[begun[index as usize]..to])
        }
    };
    pieces.iter().map(line).collect()
}

fn check(syntax: CallSyntax, text: &str, expected: &Expect) {
    expected.assert_eq(&show(&run(parser(syntax, None, u32::MAX), [text]), text));
}

#[test]
fn hermes() {
    let text = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn \\u00e9\"}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"days\": [1]}, \"name\": \"time\"}\n</tool_call>\n";
    check(
        CallSyntax::Hermes,
        text,
        &expect![[r#"
        content "I look."
        call 0 weather
          0 {"city": "Bonn \u00e9"}
        end 0
        call 1 time
          1 {"days": [1]}
        end 1
    "#]],
    );
    let text = "a <tool_call>none</tool_call> <tool_call>{\"name\": \"time\"}</tool_call>b";
    check(
        CallSyntax::Hermes,
        text,
        &expect![[r#"
        content "a <tool_call>none</tool_call>"
        call 0 time
          0 {}
        end 0
        content "b"
    "#]],
    );
    let text = "x \n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": tru}}\n</tool_call>";
    check(
        CallSyntax::Hermes,
        text,
        &expect![[r#"
        content "x"
        call 0 time
          0 {"a": tru
        broken 0 " \n<tool_call>\n{\"name\": \"time\", \"arguments\": {\"a\": tru}"
        content "}}\n</tool_call>"
    "#]],
    );
}

#[test]
fn qwen3_coder() {
    let text = "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n\"am\" Rhein\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\"]\n</parameter>\n</function>\n</tool_call>";
    check(
        CallSyntax::Qwen3Coder,
        text,
        &expect![[r#"
        content "Sure."
        call 0 weather
          0 {"city": "Bonn\n\"am\" Rhein", "days": 3, "tags": ["a"]}
        end 0
    "#]],
    );
    let text = "<function=time></function><tool_call> <function=time> <parameter=city>x<parameter=days>many</function></tool_call>";
    check(
        CallSyntax::Qwen3Coder,
        text,
        &expect![[r#"
        call 0 time
          0 {}
        end 0
        call 1 time
          1 {"city": "x", "days": "many"}
        end 1
    "#]],
    );
    check(
        CallSyntax::Qwen3Coder,
        "<tool_call>\n{\"name\": 1}</tool_call>",
        &expect![[r#"
        content "<tool_call>\n{\"name\": 1}</tool_call>"
    "#]],
    );
}

#[test]
fn llama3_json() {
    let text = " <|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}; {\"type\": \"function\", \"name\": \"time\", \"parameters\": {}}";
    check(
        CallSyntax::Llama3Json,
        text,
        &expect![[r#"
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]],
    );
    check(
        CallSyntax::Llama3Json,
        "{\"name\": \"Bob\", \"age\": 4}",
        &expect![[r#"
        content "{\"name\": \"Bob\", \"age\": 4}"
    "#]],
    );
    check(
        CallSyntax::Llama3Json,
        " <|py{\"name\"",
        &expect![[r#"
        content " <|py{\"name\""
    "#]],
    );
}

#[test]
fn mistral() {
    let text = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}, \"id\": \"abcdefghi\"}, {\"name\": \"time\", \"arguments\": {}}]";
    let both = expect![[r#"
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(CallSyntax::Mistral, text, &both);
    let text = "[TOOL_CALLS]weather{\"city\": \"Bonn\"}[TOOL_CALLS]time[CALL_ID]abc123[ARGS]{}";
    check(CallSyntax::Mistral, text, &both);
    check(
        CallSyntax::Mistral,
        "no [TOOL_CALLS](x) [TOOL_CALLS] [1",
        &expect![[r#"
        content "no [TOOL_CALLS](x) [TOOL_CALLS] [1"
    "#]],
    );
}

#[test]
fn deepseek() {
    let v3 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Bonn\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let both = expect![[r#"
        content "Ok."
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(CallSyntax::DeepSeekV3, v3, &both);
    let v31 = "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Bonn\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(CallSyntax::DeepSeekV31, v31, &both);
    check(
        CallSyntax::DeepSeekV31,
        "<｜tool▁calls▁begin｜> no",
        &expect![[r#"
        content "<｜tool▁calls▁begin｜> no"
    "#]],
    );
}

#[test]
fn reasoning() {
    let of = |beginning, text: &str| {
        show(&run(parser(CallSyntax::Hermes, Some(beginning), u32::MAX), [text]), text)
    };
    let thought = "reasoning \"\\nhm </b>\\n\"\ncontent \"\\n\\nhi\"\n";
    assert_eq!(of(Beginning::Open, "\n<think>\nhm </b>\n</think>\n\nhi"), thought);
    assert_eq!(of(Beginning::Inside, "\nhm </b>\n</think>\n\nhi"), thought);
    assert_eq!(of(Beginning::Inside, "<think>\nhm </b>\n</think>\n\nhi"), thought);
    assert_eq!(of(Beginning::Open, "hi <think>"), "content \"hi <think>\"\n");
    assert_eq!(of(Beginning::Open, " <thi"), "content \" <thi\"\n");
    assert_eq!(of(Beginning::Behind, "<think>"), "content \"<think>\"\n");
    assert_eq!(of(Beginning::Inside, "</think>hi"), "content \"hi\"\n");
    assert_eq!(of(Beginning::Inside, "hm </thi"), "reasoning \"hm </thi\"\n");
    let call = "reasoning \"go \"\ncall 0 time\n  0 {}\nend 0\n";
    assert_eq!(of(Beginning::Inside, "go <tool_call>{\"name\": \"time\"}</tool_call>"), call);

    assert_eq!(Reasoning::Qwen3.beginning("assistant\n<think>\n"), Beginning::Inside);
    assert_eq!(Reasoning::DeepSeekR1.beginning("x<think>\n\n</think>\n\n"), Beginning::Behind);
    assert_eq!(Reasoning::DeepSeekR1.beginning("assistant"), Beginning::Inside);
    assert_eq!(Reasoning::Qwen3.continues("<think>a"), Beginning::Inside);
    assert_eq!(Reasoning::DeepSeekR1.continues("<think>a</think>b"), Beginning::Behind);
}

#[test]
fn later_calls_may_be_dropped() {
    let text = "<tool_call>{\"name\": \"time\"}</tool_call> <tool_call>{\"name\": \"weather\"}</tool_call>";
    let pieces = run(parser(CallSyntax::Hermes, None, 1), [text]);
    assert_eq!(show(&pieces, text), "call 0 time\n  0 {}\nend 0\n");
}

const ALL: [CallSyntax; 6] = [
    CallSyntax::Hermes,
    CallSyntax::Qwen3Coder,
    CallSyntax::Llama3Json,
    CallSyntax::Mistral,
    CallSyntax::DeepSeekV3,
    CallSyntax::DeepSeekV31,
];

/// Scraps of every syntax, so that random sequences of them come close to calls.
const SCRAPS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "time>",
    "</function>",
    "<parameter=",
    "days>",
    "</parameter>",
    "\n",
    " ",
    "{\"name\": \"time\"",
    ", ",
    "\"arguments\": ",
    "{\"city\": \"é",
    "\"}",
    "}",
    "{",
    "[TOOL_CALLS]",
    "[",
    "]",
    "time",
    "[ARGS]",
    "[CALL_ID]",
    ";",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>",
    "time\n```json\n",
    "\n```",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "1",
    "null",
    "<",
    "x",
    MANY_SPACES,
    LONG_WORD,
];

/// Stand for more spaces, and a longer name, than a parser holds back.
const MANY_SPACES: &str = "\u{1}";
const LONG_WORD: &str = "\u{2}";

proptest! {
    #[test]
    fn any_cut_gives_the_same_pieces(
        scraps in prop::collection::vec(0..SCRAPS.len(), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        syntax in 0..ALL.len(),
        begins in 0..4_usize,
        most in 1..3_u32,
    ) {
        let text: String = scraps.into_iter().map(|i| SCRAPS[i]).collect();
        let text = text.replace(MANY_SPACES, &" ".repeat(300)).replace(LONG_WORD, &"n".repeat(600));
        let beginnings = [Beginning::Open, Beginning::Inside, Beginning::Behind].map(Some);
        let begins = [&beginnings[..], &[None]].concat()[begins];
        let whole = run(parser(ALL[syntax], begins, most), [text.as_str()]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.retain(|&cut| text.is_char_boundary(cut));
        cuts.sort_unstable();
        let parts = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        prop_assert_eq!(&whole, &run(parser(ALL[syntax], begins, most), parts));
        let one_by_one = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        prop_assert_eq!(&whole, &run(parser(ALL[syntax], begins, most), one_by_one));
        check_calls(&whole, &text)?;
    }
}

/// A complete call has arguments that are a JSON object; a broken one names its own text.
fn check_calls(pieces: &PieceList, text: &str) -> Result<(), TestCaseError> {
    let mut open: Option<(u32, usize, String)> = None;
    for piece in pieces.iter() {
        match piece {
            Piece::Call { index, from, .. } => {
                prop_assert!(open.is_none());
                open = Some((index, from, String::new()));
            }
            Piece::Arguments { index, text } => {
                let (of, _, arguments) = open.as_mut().expect("a call is open");
                prop_assert_eq!(*of, index);
                arguments.push_str(text);
            }
            Piece::End { index } => {
                let (of, _, arguments) = open.take().expect("a call is open");
                prop_assert_eq!(of, index);
                let value: serde_json::Value = serde_json::from_str(&arguments).unwrap();
                prop_assert!(value.is_object(), "{}", arguments);
            }
            Piece::Broken { index, to } => {
                let (of, from, _) = open.take().expect("a call is open");
                prop_assert_eq!(of, index);
                prop_assert!(text.get(from..to).is_some());
            }
            Piece::Content(_) | Piece::Reasoning(_) => prop_assert!(open.is_none()),
        }
    }
    prop_assert!(open.is_none());
    Ok(())
}

/// Outputs that never become a call, however long they go on.
#[test]
fn what_is_held_back_is_bounded() {
    const HELD_MAX: usize = 256 << 10;
    for (syntax, begins, unit) in [
        (CallSyntax::Hermes, "<tool_call>", " "),
        (CallSyntax::Hermes, "<tool_call>{", "\n"),
        (CallSyntax::Hermes, "<tool_call>{\"arguments\": {\"a\": \"", "x"),
        (CallSyntax::Hermes, "<tool_call>{\"id\": \"x\"", " "),
        (CallSyntax::Qwen3Coder, "<tool_call>", " "),
        (CallSyntax::Qwen3Coder, "<function=", "x"),
        (CallSyntax::Llama3Json, "", " "),
        (CallSyntax::Llama3Json, "<|python_tag|>", " "),
        (CallSyntax::Llama3Json, "{", " "),
        (CallSyntax::Llama3Json, "{\"name\": \"time\"};", ";"),
        (CallSyntax::Mistral, "[TOOL_CALLS]", " "),
        (CallSyntax::Mistral, "[TOOL_CALLS] [", " "),
        (CallSyntax::Mistral, "[TOOL_CALLS]", "x"),
        (CallSyntax::DeepSeekV3, "", "<｜tool▁calls▁begin｜>"),
        (CallSyntax::DeepSeekV3, "<｜tool▁calls▁begin｜>", " "),
        (CallSyntax::DeepSeekV3, "<｜tool▁call▁begin｜>", "x"),
        (CallSyntax::DeepSeekV31, "<｜tool▁call▁begin｜>", " "),
    ] {
        let (mut parser, mut pieces) = (parser(syntax, None, u32::MAX), PieceList::default());
        let (mut read, mut shown, mut held_max) = (0, 0, 0);
        while read < 1 << 20 {
            let part = if read == 0 { begins } else { unit };
            parser.push(part, &mut pieces);
            read += part.len().max(1);
            let content = |piece| if let Piece::Content(text) = piece { text.len() } else { 0 };
            shown += pieces.iter().map(content).sum::<usize>();
            pieces.clear();
            held_max = held_max.max(read - read.min(shown));
        }
        assert!(held_max < HELD_MAX, "{syntax:?} {begins:?} {unit:?} holds {held_max} bytes");
    }
}

/// A member whose schema is long is looked up once, however often it is named.
#[test]
fn a_long_schema_is_read_once() {
    let values: Vec<String> = (0..100_000).map(|i| format!("v{i}")).collect();
    let schema = json!({"properties": {"a": {"enum": values}, "n": {"enum": [1, 2]}}});
    let tools: Arc<[Tool]> = [Tool { name: "x".to_owned(), parameters: schema }].into();
    let mut parser = OutputParser::new(None, Some((CallSyntax::Qwen3Coder, &tools, u32::MAX)));
    let text = format!("<function=x>{}<parameter=n>2", "<parameter=a>v7".repeat(60_000));
    let mut pieces = PieceList::default();
    let start = processor_time();
    parser.push(&text, &mut pieces);
    // Sixty thousand times a hundred thousand values would take minutes.
    assert!(processor_time().saturating_sub(start) < Duration::from_secs(5));
    let Some(Piece::Arguments { text, .. }) = pieces.iter().last() else { panic!("no arguments") };
    assert!(text.starts_with("{\"a\": \"v7\", \"a\": \"v7\"") && text.ends_with("\"n\": "));
}

/// Time this thread has had a processor.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_megabyte_takes_no_time_and_no_memory() {
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
        "</thin",
        "<think>",
    ];
    let mut worst = Duration::ZERO;
    for unit in units {
        for syntax in ALL {
            let text = unit.repeat((1 << 20) / unit.len());
            let mut parser = parser(syntax, Some(Beginning::Open), u32::MAX);
            let (mut pieces, start) = (PieceList::default(), processor_time());
            parser.push(&text, &mut pieces);
            parser.finish(&mut pieces);
            let took = processor_time().saturating_sub(start);
            // A release build alone on its processor is measured by `tests/bench/outputs.rs`; here what is not
            // linear would take minutes, in any build and whatever else runs.
            assert!(took < Duration::from_secs(5), "{syntax:?} {unit:?} took {took:?}");
            worst = worst.max(took);
        }
    }
    println!("the worst took {worst:?}");
}
