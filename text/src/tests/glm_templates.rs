//! Calls and results of tools in templates of GLM-4, which take them as messages with other fields and another role.

use super::template_forms::{PLAIN, compile, of_roles, render};
use crate::{ChatInput, TextError};
use serde_json::{Value, json};

/// Prints messages as the template of GLM-4 does.
const GLM_4: &str = "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}\
    {% elif m.role == 'assistant' %}<|assistant|>{{ m.metadata }}\n{{ m.content }}\
    {% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}";

#[test]
fn calls_and_results_of_glm_4_are_rendered() {
    let call = |name: &str, arguments: Value| {
        let function = json!({"name": name, "arguments": arguments});
        json!({"id": "c", "type": "function", "function": function})
    };
    let calls = [call("f", json!("{\"a\":1}")), call("g", json!({"b": [1, 2]}))];
    let result = |content: Value| json!({"role": "tool", "tool_call_id": "c", "content": content});
    let messages = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "Look.", "tool_calls": calls},
        result(json!("one")),
        result(json!([{"type": "text", "text": "two"}])),
        {"role": "assistant", "content": null, "tool_calls": [call("f", json!("{}"))]},
        result(json!("three")),
    ]);
    let input = ChatInput { messages: messages.clone(), ..ChatInput::default() };
    assert_eq!(compile(GLM_4).1.hidden_fields(&input, false), []);
    let expected = "<|user|>\nq<|assistant|>\nLook.<|assistant|>f\n{\"a\":1}<|assistant|>g\n{\"b\": [1, 2]}\
        <|observation|>\none<|observation|>\ntwo<|assistant|>f\n{}<|observation|>\nthree";
    assert_eq!(render(GLM_4, messages).unwrap(), expected);
}

#[test]
fn observations_need_a_template_that_shows_them() {
    let messages = json!([{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}]);
    let known = of_roles("'user', 'assistant', 'tool', 'observation'", PLAIN);
    assert_eq!(render(&known, messages.clone()).unwrap(), "[user]q[tool]r");
    let hidden = render(&of_roles("'user', 'assistant'", PLAIN), messages);
    assert!(matches!(hidden, Err(TextError::RoleNotShown { index: 1, .. })));
}
