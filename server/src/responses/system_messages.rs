//! Places the system messages of a conversation where its chat template accepts them.

use crate::app::ServingContext;
use crate::openai::chat::generation_start::render_text;
use crate::openai::chat::types::ChatCompletionRequest;
use serde_json::{Value, json};
use text::ChatInput;

/// Returns the messages of a conversation. `instructions` and the system messages at the start are joined to
/// one message, because chat templates accept only one system message, which must come first.
pub(super) fn joined_conversation(instructions: Option<&str>, history: &[Value]) -> Value {
    let leading = history.iter().take_while(|message| is_system(message)).count();
    let (system, rest) = history.split_at(leading);
    with_system_text(instructions.into_iter().chain(texts(system)), rest)
}

/// Joins later system messages to the first one too, if the template rejects or omits them where they are.
pub(super) fn place(serving: &ServingContext, request: &mut ChatCompletionRequest) {
    let Some(messages) = request.input.messages.as_array() else { return };
    let later = messages.iter().skip(1).filter(|message| is_system(message));
    let later: Vec<&str> = later.filter_map(|message| message["content"].as_str()).collect();
    if later.is_empty() {
        return;
    }
    let tools = request.tools.template_value.clone();
    let input = ChatInput { tools, ..request.input.clone() };
    let rendered = render_text(serving, input, request.prompt_field);
    if rendered.is_ok_and(|prompt| later.iter().all(|text| prompt.contains(text.trim()))) {
        return;
    }
    let (system, rest): (Vec<_>, Vec<_>) = messages.iter().cloned().partition(is_system);
    request.input.messages = with_system_text(texts(&system), &rest);
}

fn is_system(message: &Value) -> bool {
    message["role"] == "system"
}

fn texts(messages: &[Value]) -> impl Iterator<Item = &str> {
    messages.iter().filter_map(|message| message["content"].as_str())
}

/// Returns `messages`, preceded by one system message if there are system texts.
fn with_system_text<'a>(system: impl Iterator<Item = &'a str>, messages: &[Value]) -> Value {
    let system: Vec<&str> = system.collect();
    let first = json!({"role": "system", "content": system.join("\n\n")});
    let first = (!system.is_empty()).then_some(first);
    first.into_iter().chain(messages.iter().cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_system_messages_are_joined() {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let history = [
            message("system", "a"),
            message("system", "b"),
            message("user", "x"),
            message("system", "c"),
        ];
        let joined = joined_conversation(Some("i"), &history);
        let expected =
            json!([message("system", "i\n\na\n\nb"), message("user", "x"), message("system", "c")]);
        assert_eq!(joined, expected);
        assert_eq!(joined_conversation(None, &history[2..3]), json!([message("user", "x")]));
    }
}
