//! Tool calls of the model families, as their chat templates print them.

mod reasoning_families;

use super::output_parsers::{check, parser, run};
use crate::{CallEnforcement, OutputParser, OutputPiece, OutputPieces};
use crate::{ReasoningFamily, ReasoningParserOptions, ReasoningStart};
use crate::{ToolCallParserOptions, ToolCallSyntax, ToolDefinition};
use expect_test::expect;

#[test]
fn glm_tool_calls() {
    let text = "Look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn\n am Rhein</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time</tool_call>";
    let both = expect![[r#"
        content "Look."
        call 0 weather
          0 {"city": "Bonn\n am Rhein", "days": 3}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(ToolCallSyntax::GLM45, text, &both);
    let text = "Look.<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn\n am Rhein</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>time\n</tool_call>";
    check(ToolCallSyntax::GLM47, text, &both);
    check(
        ToolCallSyntax::GLM45,
        "<tool_call>{\"name\": \"time\"}</tool_call>",
        &expect![[r#"
            content "<tool_call>{\"name\": \"time\"}</tool_call>"
        "#]],
    );
}

#[test]
fn glm_4_tool_calls() {
    let both = expect![[r#"
        content "Look."
        call 0 weather
          0 {"city": "Bonn\n"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    let weather = "weather\n{\"city\": \"Bonn\\n\"}";
    for text in [
        format!("Look.\n{weather}<|assistant|>time\n{{}}"),
        format!("Look.<|assistant|>{weather}\n<|assistant|> time \n{{}}\n"),
        format!("Look.\n\n  {weather}\r\ntime\r\n\n{{}}"),
    ] {
        check(ToolCallSyntax::GLM4, &text, &both);
    }
}

#[test]
fn lines_that_are_no_glm_4_calls_are_content() {
    for text in [
        "time",
        "time\n",
        "times\n{}",
        "The time\n{}",
        "unknown\n{}",
        "time {}",
        "time\nx\n{}",
        "<|assistant|>The time is 3.",
        "<|assistant|><|assistant|>",
    ] {
        let pieces = run(parser(ToolCallSyntax::GLM4, None, u32::MAX), [text]);
        let content = pieces.iter().map(|piece| match piece {
            OutputPiece::Content(text) => text.to_owned(),
            other => panic!("{other:?} in {text}"),
        });
        assert_eq!(content.collect::<String>(), text);
    }
}

/// A broken call is reported up to its fault, and a call may follow it.
#[test]
fn broken_glm_4_call_is_followed_by_a_call() {
    check(
        ToolCallSyntax::GLM4,
        "time\ntime\n{\"a\": }\ntime\n{}",
        &expect![[r#"
            content "time"
            call 0 time
              0 {"a": 
            broken 0 "\ntime\n{\"a\": "
            content "}"
            call 1 time
              1 {}
            end 1
        "#]],
    );
}

/// SmolLM3 prints JSON calls without line breaks, and several calls after one another. Python code between `<code>` tags
/// is content.
#[test]
fn smollm3_tool_calls() {
    check(
        ToolCallSyntax::HERMES,
        "Let me see.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}</tool_call><tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>",
        &expect![[r#"
            content "Let me see."
            call 0 weather
              0 {"city": "Bonn"}
            end 0
            call 1 time
              1 {}
            end 1
        "#]],
    );
    check(
        ToolCallSyntax::HERMES,
        "<code>weather(city=\"Bonn\")</code>",
        &expect![[r#"
        content "<code>weather(city=\"Bonn\")</code>"
    "#]],
    );
}

#[test]
fn minimax_m2_tool_calls() {
    check(
        ToolCallSyntax::MINIMAX_M2,
        "Ok.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Bonn <b></parameter>\n<parameter name=\"tags\">[\"a\"]</parameter>\n</invoke>\n<invoke name=\"time\">\n</invoke>\n</minimax:tool_call>\n",
        &expect![[r#"
            content "Ok."
            call 0 weather
              0 {"city": "Bonn <b>", "tags": ["a"]}
            end 0
            call 1 time
              1 {}
            end 1
        "#]],
    );
}

#[test]
fn deepseek_v32_tool_calls() {
    check(
        ToolCallSyntax::DEEPSEEK_V32,
        "Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">12</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">12</｜DSML｜parameter>\n<｜DSML｜parameter name=\"x\" string=\"false\">{\"a\": null}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        &expect![[r#"
            content "Ok."
            call 0 weather
              0 {"city": "12", "days": 12, "x": {"a": null}}
            end 0
        "#]],
    );
}

#[test]
fn seed_oss_tool_calls() {
    check(
        ToolCallSyntax::SEED_OSS,
        "Ok.<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn\n</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        &expect![[r#"
            content "Ok."
            call 0 weather
              0 {"city": "Bonn\n", "days": 2}
            end 0
        "#]],
    );
}

#[test]
fn kimi_k2_tool_calls() {
    check(
        ToolCallSyntax::KIMI_K2,
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Bonn\"}<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        &expect![[r#"
            content "Ok."
            call 0 weather
              0 {"city": "Bonn"}
            end 0
            call 1 time
              1 {}
            end 1
        "#]],
    );
}

#[test]
fn calls_between_function_calls_tags() {
    let both = expect![[r#"
        content "See."
        call 0 weather
          0 {"city": "Bo\"nn", "days": 3, "tags": ["a", {"b": null}]}
        end 0
        call 1 time
          1 {"utc": true}
        end 1
        content " Done."
    "#]];
    let weather = "weather(city='Bo\"nn', days=3, tags=['a', {'b': None}])";
    for calls in
        [format!("{weather}\ntime(utc=true)"), format!("\n{weather}\n\n  time(utc=True)\n")]
    {
        let text = format!("See. <function_calls>{calls}</function_calls> Done.");
        check(ToolCallSyntax::OLMO3, &text, &both);
    }
}

#[test]
fn function_calls_tags_without_calls_are_content() {
    for text in [
        "<function_calls></function_calls>",
        "<function_calls>unknown()</function_calls>",
        "<function_calls>print(time())</function_calls>",
        "<functions>time()</functions>",
    ] {
        let pieces = run(parser(ToolCallSyntax::OLMO3, None, u32::MAX), [text]);
        let content = pieces.iter().map(|piece| match piece {
            OutputPiece::Content(text) => text.to_owned(),
            other => panic!("{other:?} in {text}"),
        });
        assert_eq!(content.collect::<String>(), text);
    }
}

#[test]
fn names_with_slashes_and_colons_are_parsed() {
    const NAME: &str = "mcp/clock.now:2";
    let parameters = serde_json::json!({"type": "object"});
    let tools = [ToolDefinition { name: NAME.to_owned(), parameters, is_strict: false }].into();
    for (syntax, text) in [
        (ToolCallSyntax::PYTHONIC, format!("[{NAME}()]")),
        (ToolCallSyntax::TOOL_CODE, format!("```tool_code\n{NAME}()\n```")),
        (ToolCallSyntax::OLMO3, format!("<function_calls>{NAME}()</function_calls>")),
        (ToolCallSyntax::MISTRAL, format!("[TOOL_CALLS]{NAME}{{}}")),
        (ToolCallSyntax::MISTRAL, format!("[TOOL_CALLS]{NAME}[ARGS]{{}}")),
    ] {
        let options = ToolCallParserOptions {
            syntax,
            tools: &tools,
            max_calls: 1,
            enforcement: CallEnforcement::None,
        };
        let pieces = run(OutputParser::new(None, Some(options)), [text.as_str()]);
        let names: Vec<&str> = pieces
            .iter()
            .filter_map(|piece| match piece {
                OutputPiece::Call { name, .. } => Some(name),
                _ => None,
            })
            .collect();
        assert_eq!(names, [NAME], "{syntax:?}");
    }
}

#[test]
fn calls_in_tool_code_fences() {
    let both = expect![[r#"
        content "See."
        call 0 weather
          0 {"city": "Bo\"nn", "days": 3}
        end 0
        call 1 time
          1 {}
        end 1
        content " Done."
    "#]];
    for calls in [
        "weather(city='Bo\"nn', days=3)\ntime()",
        "\nprint(weather(city='Bo\"nn', days=3))\n print( time() )\n",
    ] {
        let text = format!("See.\n```tool_code\n{calls}\n``` Done.");
        check(ToolCallSyntax::TOOL_CODE, &text, &both);
    }
    let text = "```tool_code\nx = time()\n```";
    check(
        ToolCallSyntax::TOOL_CODE,
        text,
        &expect![[r#"
            content "```tool_code\nx = time()\n```"
        "#]],
    );
    check(
        ToolCallSyntax::TOOL_CODE,
        "```python\ntime()\n``` ```tool_codetime()",
        &expect![[r#"
            content "```python\ntime()\n``` ```tool_codetime()"
        "#]],
    );
    check(
        ToolCallSyntax::TOOL_CODE,
        "```tool_code\ntime()\nunknown()\n```",
        &expect![[r#"
            call 0 time
              0 {}
            end 0
            content "\nunknown()\n```"
        "#]],
    );
}

#[test]
fn calls_of_granite_20b() {
    let call =
        |name: &str| format!("<function_call> {{\"name\": \"{name}\", \"arguments\": {{}}}}");
    let text = format!("Ok.\n{}{}", call("time"), call("weather"));
    check(
        ToolCallSyntax::GRANITE_20B,
        &text,
        &expect![[r#"
            content "Ok."
            call 0 time
              0 {}
            end 0
            call 1 weather
              1 {}
            end 1
        "#]],
    );
}

#[test]
fn pythonic_tool_calls() {
    let both = expect![[r#"
        call 0 weather
          0 {"city": "Bo\"nn", "days": 3, "tags": ["a", {"b": null}]}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    let text = "[weather(city='Bo\"nn', days=3, tags=['a', {'b': None}]), time()]";
    check(ToolCallSyntax::PYTHONIC, text, &both);
    let text = format!("<|python_start|>{text}<|python_end|>");
    check(ToolCallSyntax::PYTHONIC, &text, &both);
}

#[test]
fn invalid_pythonic_calls_are_content() {
    check(
        ToolCallSyntax::PYTHONIC,
        "[1] see [time()]",
        &expect![[r#"
            content "[1] see [time()]"
        "#]],
    );
    check(
        ToolCallSyntax::PYTHONIC,
        "[time(city=x)]",
        &expect![[r#"
            call 0 time
              0 {"city": 
            broken 0 "[time(city=x"
            content ")]"
        "#]],
    );
}

#[test]
fn gemma_tool_calls() {
    let both = expect![[r#"
        content "Ok."
        call 0 weather
          0 {"city": "Bonn \"x\"{,}", "days": 3, "tags": ["a", {"b": null}]}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    let text = |open: &str, quote: &str, close: &str| {
        format!(
            "Ok.\n{open}call:weather{{city:{quote}Bonn \"x\"{{,}}{quote},days:3,tags:[{quote}a{quote},{{b:null}}]}}{close}{open}call:time{{}}{close}"
        )
    };
    let function_gemma = text("<start_function_call>", "<escape>", "<end_function_call>");
    check(ToolCallSyntax::FUNCTION_GEMMA, &function_gemma, &both);
    check(ToolCallSyntax::GEMMA4, &text("<|tool_call>", "<|\"|>", "<tool_call|>"), &both);
    check(
        ToolCallSyntax::GEMMA4,
        "<|tool_call>call:time{days:]}<tool_call|> <|tool_call>x",
        &expect![[r#"
            call 0 time
              0 {"days": 
            broken 0 "<|tool_call>call:time{days:"
            content "]}<tool_call|> <|tool_call>x"
        "#]],
    );
}

#[test]
fn tool_calls_in_a_json_array() {
    let list = "[{\"name\": \"weather\", \"arguments\": {\"city\": \"Bonn\"}}, {\"name\": \"time\", \"arguments\": {}}]";
    let both = expect![[r#"
        call 0 weather
          0 {"city": "Bonn"}
        end 0
        call 1 time
          1 {}
        end 1
    "#]];
    check(ToolCallSyntax::GRANITE, list, &both);
    check(ToolCallSyntax::GRANITE, &format!("<|tool_call|>{list}"), &both);
    check(ToolCallSyntax::GRANITE, &format!("<tool_call> {list}\n"), &both);
    check(ToolCallSyntax::PHI4_MINI, &format!("functools{list}"), &both);
    check(ToolCallSyntax::PHI4_MINI, &format!("<|tool_call|>{list}<|/tool_call|>"), &both);
    check(ToolCallSyntax::XLAM, list, &both);
    check(ToolCallSyntax::XLAM, &format!("```json\n{list}\n```"), &both);
    check(
        ToolCallSyntax::XLAM,
        "```json\n[{\"name\": \"Bob\"}]\n```",
        &expect![[r#"
            content "```json\n[{\"name\": \"Bob\"}]\n```"
        "#]],
    );
}
