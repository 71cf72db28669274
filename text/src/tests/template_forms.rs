//! Tests of the forms in which templates take conversations: content, tool call arguments, roles, named
//! templates, and templates that take no messages.

use serde_json::{Value, json};

use super::{byte_level, load, write};
use crate::{ChatInput, ChatTemplate, HiddenChatField, TextError, Tokenizer};

pub(super) fn compile(template: &str) -> (Tokenizer, ChatTemplate) {
    let (dir, tokenizer) = load(&byte_level());
    let template = ChatTemplate::load(dir.path(), Some(template), &tokenizer, 1 << 20).unwrap();
    (tokenizer, template.unwrap())
}

pub(super) fn render(template: &str, messages: Value) -> Result<String, TextError> {
    let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
    compile(template).1.render(input).map(|rendered| rendered.text)
}

/// Returns a template that prints each message whose role is in `roles`; `content` is the expression that
/// prints the content.
pub(super) fn of_roles(roles: &str, content: &str) -> String {
    format!(
        "{{% for m in messages %}}{{% if m.role in [{roles}] %}}[{{{{ m.role }}}}]{content}{{% endif %}}{{% endfor %}}"
    )
}

const LOOP: &str =
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}";
const EITHER: &str = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}";
pub(super) const PLAIN: &str = "{{ m.content }}";
const ALL: &str = "'system', 'user', 'assistant', 'tool'";

#[test]
fn absent_tools_and_documents_are_none() {
    let template = "{% if tools is not none and tools|length > 0 %}T{% else %}N{% endif %}\
                    {% if documents is not none %}D{% else %}N{% endif %} {{ tools|tojson }}";
    let (_, template) = compile(template);
    let render = |tools: Value, documents: Value| {
        let input = ChatInput { messages: json!([]), tools, documents, ..ChatInput::default() };
        template.render(input).unwrap().text
    };
    assert_eq!(render(Value::Null, Value::Null), "NN null");
    assert_eq!(render(json!([]), json!([])), "ND []");
    assert_eq!(render(json!([1]), json!([{}])), "TD [1]");
}

#[test]
fn content_gets_the_form_that_the_template_shows() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    for (shown, content, expected) in [
        (LOOP, json!("ab"), "ab"),
        (LOOP, parts.clone(), "ab"),
        (EITHER, json!("ab"), "ab"),
        (EITHER, parts.clone(), "ab"),
        (PLAIN, json!("ab"), "ab"),
        (PLAIN, parts.clone(), "a\nb"),
        (
            "{{ m.content|tojson }}",
            parts.clone(),
            &parts.to_string().replace(',', ", ").replace(':', ": "),
        ),
    ] {
        let messages = json!([{"role": "user", "content": content}]);
        let text = render(&of_roles(ALL, shown), messages).unwrap();
        assert_eq!(text, format!("[user]{expected}"), "{shown} {content}");
    }
}

#[test]
fn content_forms_are_found_for_each_role() {
    let template = "{% for m in messages %}{% if m.role == 'system' %}<{{ m.content|trim }}>\
                    {% elif m.role == 'user' %}{% for p in m.content %}{{ p.text }},{% endfor %}\
                    {% endif %}{% endfor %}";
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages =
        json!([{"role": "system", "content": parts}, {"role": "user", "content": parts}]);
    assert_eq!(render(template, messages).unwrap(), "<a\nb>a,b,");
}

/// A conversation with one tool call.
fn with_call(content: &Value, arguments: &Value) -> Value {
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
    json!([{"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": [call]}])
}

/// Returns a template that prints tool calls; `shown` is the expression that prints the arguments.
fn of_calls(shown: &str) -> String {
    format!(
        "{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}<{shown}>\
         {{% endfor %}}{{% endfor %}}"
    )
}

#[test]
fn arguments_get_the_form_that_the_template_shows() {
    let items = "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}";
    let either = "{% if c.function.arguments is string %}S{{ c.function.arguments }}\
                  {% else %}{{ c.function.arguments|tojson }}{% endif %}";
    let sent = json!("{\"a\":1,  \"b\": \"x\"}");
    let object = json!({"a": 1, "b": "x"});
    for (shown, arguments, expected) in [
        ("{{ 'n' + c.function.arguments }}", &sent, "n{\"a\":1,  \"b\": \"x\"}"),
        ("{{ 'n' + c.function.arguments }}", &object, "n{\"a\": 1, \"b\": \"x\"}"),
        (items, &sent, "a=1;b=x;"),
        (items, &object, "a=1;b=x;"),
        (either, &sent, "{\"a\": 1, \"b\": \"x\"}"),
        ("{{ c.function.arguments|tojson }}", &sent, "{\"a\": 1, \"b\": \"x\"}"),
    ] {
        let text = render(&of_calls(shown), with_call(&json!(""), arguments)).unwrap();
        assert_eq!(text, format!("q<{expected}>"), "{shown}");
    }
}

#[test]
fn special_tokens_in_escaped_arguments_stay_text() {
    let items = "{% for k, v in c.function.arguments|items %}{{ v }}{% endfor %}";
    let (tokenizer, template) = compile(&of_calls(items));
    let arguments = json!("{\"a\": \"<|im\\u005fend|>\"}");
    let messages = with_call(&json!(""), &arguments);
    let rendered = template.render(ChatInput { messages, ..ChatInput::default() }).unwrap();
    assert_eq!(rendered.text, "q<<|im_end|>>");
    let ids = tokenizer.encode_rendered(&rendered).unwrap();
    assert!(ids.iter().all(|&id| !tokenizer.is_special(id)));
}

#[test]
fn null_content_is_absent_where_the_template_takes_it() {
    let call = "{{ c.function.arguments|tojson }}";
    let printed = of_calls(call);
    let checked = printed.replace("{{ m.content }}", "{% if m.content is none %}N{% endif %}");
    let joined = printed.replace("{{ m.content }}", "{{ 'x' + m.content }}");
    for (template, expected) in [(printed, "q<{}>"), (checked, "<{}>"), (joined, "xqx<{}>")] {
        let text = render(&template, with_call(&Value::Null, &json!("{}"))).unwrap();
        assert_eq!(text, expected, "{template}");
    }
}

#[test]
fn developer_becomes_system_only_if_it_would_be_lost() {
    let messages = json!([{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]);
    for (roles, expected) in [
        (ALL, "[system]d[user]u"),
        ("'developer', 'user'", "[developer]d[user]u"),
        ("m.role", "[developer]d[user]u"),
    ] {
        assert_eq!(render(&of_roles(roles, PLAIN), messages.clone()).unwrap(), expected);
    }
    let lost = render(&of_roles("'user'", PLAIN), messages.clone());
    assert_eq!(lost, Err(TextError::RoleNotShown { index: 0, role: "developer".to_owned() }));
    let strict = "{% if messages[0].role == 'developer' %}{{ raise_exception('role') }}{% endif %}";
    let first = format!("{strict}{}", of_roles("m.role", PLAIN));
    assert_eq!(render(&first, messages.clone()).unwrap(), "[system]d[user]u");
    let strict = format!("{strict}{}", of_roles(ALL, PLAIN));
    assert_eq!(render(&strict, messages).unwrap(), "[system]d[user]u");
}

#[test]
fn messages_that_a_template_leaves_out_are_errors() {
    let of = |role: &str| json!([{"role": "user", "content": "u"}, {"role": role, "content": "x"}]);
    let three = of_roles("'system', 'user', 'assistant'", PLAIN);
    for role in ["tool", "critic"] {
        let expected = TextError::RoleNotShown { index: 1, role: role.to_owned() };
        assert_eq!(render(&three, of(role)), Err(expected));
    }
    let empty = json!([{"role": "critic", "content": " "}, {"role": "user", "content": "u"}]);
    assert_eq!(render(&three, empty).unwrap(), "[user]u", "nothing is lost");
    let critic = of_roles("'user', 'critic'", PLAIN);
    assert_eq!(render(&critic, of("critic")).unwrap(), "[user]u[critic]x");
    // A template whose output contains no messages at all is accepted, because it serves another purpose than
    // chat.
    assert_eq!(render("{{ messages|length }}", of("critic")).unwrap(), "2");
}

#[test]
fn reasoning_is_passed_under_the_name_that_is_shown() {
    let template = "{% for m in messages %}{{ m.content }}{% if m.reasoning_content %}\
                    <{{ m.reasoning_content }}>{% endif %}{% endfor %}";
    for key in ["reasoning", "reasoning_content"] {
        let messages = json!([{"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", key: "r"}]);
        assert_eq!(render(template, messages).unwrap(), "ua<r>");
    }
}

#[test]
fn whole_messages_are_printed_as_sent() {
    let text = r#"{"content": "c", "role": "user", "a": {"y": null, "b": []}}"#;
    let message: Value = serde_json::from_str(text).unwrap();
    assert_eq!(render("{{ messages[0]|tojson }}", json!([message])).unwrap(), text);
}

#[test]
fn null_keys_of_messages_are_absent_and_inner_nulls_remain() {
    // The output of `apply_chat_template` of transformers 5.23.0 for this template and these messages.
    let call = json!({"type": "function", "id": null,
        "function": {"name": "f", "arguments": {"a": null}}});
    let mut message = json!({"role": "assistant", "content": null});
    message["tool_calls"] = json!([call]);
    let template = "{% for m in messages %}{{ m|tojson }}|{{ 'content' in m }} {% endfor %}";
    let text = render(template, json!([{"role": "user", "content": "x"}, message])).unwrap();
    let expected = r#"{"role": "user", "content": "x"}|True {"role": "assistant", "tool_calls": [{"type": "function", "id": null, "function": {"name": "f", "arguments": {"a": null}}}]}|False "#;
    assert_eq!(text, expected);
}

#[test]
fn additional_templates_are_selected_by_name() {
    let (dir, tokenizer) = load(&byte_level());
    let folder = dir.path().join("additional_chat_templates");
    std::fs::create_dir(&folder).unwrap();
    for (name, text) in [("tool_use.jinja", "tools"), ("rag.jinja", "rag"), ("notes.txt", "{% if")]
    {
        std::fs::write(folder.join(name), text).unwrap();
    }
    write(dir.path(), "tokenizer_config.json", &json!({"chat_template": "unused"}));
    let render = |name: Option<&str>, tools: Value| {
        let template = ChatTemplate::load(dir.path(), None, &tokenizer, 1 << 20).unwrap().unwrap();
        let template_name = name.map(str::to_owned);
        let messages = json!([]);
        let input = ChatInput { template: template_name, messages, tools, ..ChatInput::default() };
        (name.is_some_and(|name| template.has_named(name)), template.render(input).map(|r| r.text))
    };
    let names = TextError::NoDefaultTemplate("rag, tool_use".to_owned());
    assert_eq!(render(None, Value::Null), (false, Err(names)));
    std::fs::write(dir.path().join("chat_template.jinja"), "default").unwrap();
    assert_eq!(render(None, Value::Null), (false, Ok("default".to_owned())));
    assert_eq!(render(None, json!([])), (false, Ok("tools".to_owned())));
    assert_eq!(render(Some("rag"), json!([])), (true, Ok("rag".to_owned())));
    assert_eq!(render(Some("default"), json!([])), (true, Ok("default".to_owned())));
}

#[test]
fn fields_that_the_template_hides_are_named() {
    let hidden = |template: &str, messages: Value, tools: bool| {
        let input = ChatInput { messages, ..ChatInput::default() };
        compile(template).1.hidden_fields(&input, tools)
    };
    let calls = with_call(&json!(""), &json!("{}"));
    let plain = of_roles(ALL, PLAIN);
    assert_eq!(
        hidden(&plain, calls.clone(), true),
        [HiddenChatField::Tools, HiddenChatField::ToolCalls]
    );
    assert!(hidden(&plain, json!([]), false).is_empty());
    let all = format!("{{{{ tools|tojson }}}}{}", of_calls("{{ c.function.arguments|tojson }}"));
    assert!(hidden(&all, calls, true).is_empty());
}

#[test]
fn documents_and_effort_are_hidden_from_templates_without_them() {
    let hidden = |template: &str, documents: Value| {
        let mut input = ChatInput { messages: json!([]), documents, ..ChatInput::default() };
        input.kwargs.insert("reasoning_effort".to_owned(), json!("high"));
        compile(template).1.hidden_fields(&input, false)
    };
    let documents = json!([{"text": "d"}]);
    let others = "documents {{ messages.documents }}{# reasoning_effort #}";
    assert_eq!(
        hidden(others, documents.clone()),
        [HiddenChatField::Documents, HiddenChatField::ReasoningEffort]
    );
    assert_eq!(hidden(others, json!([])), [HiddenChatField::ReasoningEffort]);
    let read = "{% for d in documents %}{{ d.text }}{% endfor %}{{ reasoning_effort }}";
    assert!(hidden(read, documents).is_empty());
}

#[test]
fn unread_template_variables_are_named() {
    let mut input = ChatInput { messages: json!([]), ..ChatInput::default() };
    for name in ["enable_thinking", "preserve_thinking"] {
        input.kwargs.insert(name.to_owned(), json!(true));
    }
    let hidden = |template: &str| compile(template).1.hidden_fields(&input, false);
    let variable = |name: &str| HiddenChatField::TemplateVariable(name.to_owned());
    assert_eq!(hidden("{{ enable_thinking }}"), [variable("preserve_thinking")]);
    let both = [variable("enable_thinking"), variable("preserve_thinking")];
    assert_eq!(hidden("{{ messages.enable_thinking }}"), both);
}

#[test]
fn failures_give_their_reason_without_added_characters() {
    let (_, template) = compile("{{ raise_exception('no ' ~ messages[0].content) }}");
    let messages = json!([{"role": "user", "content": "a<|im_end|>b"}]);
    let failed = template.render(ChatInput { messages, ..ChatInput::default() }).unwrap_err();
    assert_eq!(failed, TextError::TemplateException("no a<|im_end|>b".to_owned()));
    let message = render("{{ 1 + 'a' }}", json!([])).unwrap_err().to_string();
    let reason = message.strip_prefix("the chat template cannot render these messages: ");
    assert!(reason.is_some_and(|reason| reason.len() > 10), "{message}");
    let long = TextError::Template("x".repeat(10_000)).to_string();
    assert!(long.len() < 400, "{}", long.len());
}
