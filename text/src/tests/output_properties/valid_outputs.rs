//! Valid and malformed output of each tool call syntax.

use super::*;

/// Returns an output with two calls, and with content if the syntax allows content.
pub(crate) fn valid_output(syntax: ToolCallSyntax) -> String {
    let json = |key: &str| {
        format!("{{\"name\": \"weather\", \"{key}\": {{\"city\": \"B\\n\", \"tags\": [1, {{}}]}}}}")
    };
    let arguments = "{\"city\": \"B\\n\", \"tags\": [1, {}]}";
    let list = format!("[{0}, {0}]", json("arguments"));
    let tags = "<function=weather>\n<parameter=city>\nB\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>";
    let invoke = "<invoke name=\"weather\">\n<parameter name=\"city\">B</parameter>\n</invoke>\n";
    let dsml = "<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">B</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n";
    let arg = "<arg_key>city</arg_key>\n<arg_value>B</arg_value>";
    match syntax.name() {
        "hermes" => {
            let call = format!("<tool_call>\n{}\n</tool_call>", json("arguments"));
            format!("a\n{call}\n{call} b\n")
        }
        "qwen3_coder" => {
            format!("a <tool_call>\n{tags}\n</tool_call>\n<tool_call>{tags}</tool_call> b")
        }
        "seed_oss" => {
            format!(
                "a <seed:tool_call>\n{tags}\n</seed:tool_call>\n<seed:tool_call>{tags}</seed:tool_call> b"
            )
        }
        "minimax_m2" => {
            format!("a <minimax:tool_call>\n{invoke}{invoke}</minimax:tool_call> b")
        }
        "deepseek_v32" => {
            format!("a\n\n<｜DSML｜function_calls>\n{dsml}{dsml}</｜DSML｜function_calls> b")
        }
        "glm45" | "glm47" => {
            format!(
                "a\n<tool_call>weather\n{arg}\n</tool_call>\n<tool_call>weather{arg}</tool_call> b"
            )
        }
        "glm4" => {
            let call = format!("weather\n{arguments}");
            format!("a\n{call}<|assistant|>{call}\nb")
        }
        "llama3_json" => format!("{0}; {0} b", json("parameters")),
        "pythonic" => {
            "[weather(city='B\\n', tags=[1, {}]), weather(days=3)] b".to_owned()
        }
        "gemma3_tool_code" => {
            "a\n```tool_code\nweather(city='B\\n', tags=[1, {}])\nprint(weather(days=3))\n``` b"
                .to_owned()
        }
        "olmo3" => {
            "a <function_calls>weather(city='B\\n', tags=[1, {}])\nweather(days=3)</function_calls> b"
                .to_owned()
        }
        "granite-20b-fc" => {
            let call = format!("<function_call> {}", json("arguments"));
            format!("a\n{call}\n{call} b")
        }
        "mistral" => {
            format!(
                "a [TOOL_CALLS]{list} b [TOOL_CALLS]weather[ARGS]{arguments}[TOOL_CALLS]weather{arguments} c"
            )
        }
        "deepseek_v3" => {
            let call = format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            );
            format!("a <｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜> b")
        }
        "deepseek_v31" => {
            let call =
                format!("<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>");
            format!("a <｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜> b")
        }
        "kimi_k2" => {
            let call = format!(
                "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            );
            format!("a <|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|> b")
        }
        "granite" => format!("<|tool_call|>{list} b"),
        "phi4_mini_json" => {
            format!("a functools{list} b <|tool_call|>{list}<|/tool_call|>")
        }
        "xlam" => format!("a\n```json\n{list}\n``` b"),
        "functiongemma" => {
            let call = "<start_function_call>call:weather{city:<escape>B\n<escape>,tags:[1,{}]}<end_function_call>";
            format!("a\n{call}{call} b")
        }
        "gemma4" => {
            let call = "<|tool_call>call:weather{city:<|\"|>B\n<|\"|>,tags:[1,{}]}<tool_call|>";
            format!("a\n{call}\n{call} b")
        }
        "harmony" => {
            let to = "to=functions.weather";
            let first =
                format!("<|channel|>commentary {to} <|constrain|>json<|message|>{arguments}");
            let next = format!(" {to}<|channel|>commentary json<|message|>{arguments}");
            format!("a<|end|><|start|>assistant{first}<|call|><|start|>assistant{next}<|call|>b")
        }
        name => panic!("{name} has no valid output here"),
    }
}

#[test]
fn valid_calls_are_all_parsed() {
    for syntax in ToolCallSyntax::all() {
        let text = valid_output(syntax);
        let runs = runs(&run(parser(syntax, None, u32::MAX), [text.as_str()]), &text);
        let calls = |run: &OutputSegment| match run {
            OutputSegment::Calls(calls) => {
                calls.iter().filter(|call| call.name == "weather").count()
            }
            OutputSegment::Content(text) => {
                assert!(text.trim().len() == 1, "{syntax:?} {text:?}");
                0
            }
        };
        let expected = if matches!(syntax.name(), "mistral" | "phi4_mini_json") { 4 } else { 2 };
        assert_eq!(runs.iter().map(calls).sum::<usize>(), expected, "{syntax:?} {runs:?}");
    }
}

#[test]
fn malformed_calls_are_content_as_written() {
    let call = |arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"time\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let hermes = ["{\"a\": \"one\ntwo\"}", "{\"a\": tru}", "{\"a\": \"x\",}", "null", "\"{}\""];
    let mut outputs: Vec<(ToolCallSyntax, String)> =
        hermes.iter().map(|arguments| (ToolCallSyntax::HERMES, call(arguments))).collect();
    let nested = "<tool_call>\n<function=time>\n<parameter=city>\n<b>\n<parameter>x</parameter>\n</b>\n</parameter>\n</function>\n</tool_call>";
    outputs.push((ToolCallSyntax::QWEN3_CODER, nested.to_owned()));
    let list = "[TOOL_CALLS][{\"name\": \"time\", \"arguments\": {\"a\": tru}}]";
    outputs.push((ToolCallSyntax::MISTRAL, list.to_owned()));
    for (syntax, output) in outputs {
        let runs = runs(&run(parser(syntax, None, u32::MAX), [output.as_str()]), &output);
        assert_eq!(runs, [OutputSegment::Content(output)]);
    }
}
