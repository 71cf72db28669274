//! Places system messages that clients of `/v1/messages` and `/v1/responses` send in the middle of a
//! conversation.
//!
//! If the chat template shows such a message at its position, the message stays there. Otherwise its text is
//! merged into the message before or after it. Either way, each request's prompt extends the prompt of the
//! preceding request, which prefix caching requires. As in vLLM, system messages are always merged if the
//! conversation does not start with a system prompt, because some templates print the tools at the first
//! system message.

use serde_json::{Value, json};

/// Separator between a merged system message and the text of the neighbouring message.
const SEPARATOR: &str = "\n\n";

/// Joins the system messages at the start of a conversation, and places the other system messages.
/// `is_shown_inline` returns whether the chat template shows system messages in the middle of a conversation.
pub(crate) fn place_system_turns(
    messages: Vec<Value>,
    is_shown_inline: impl FnOnce() -> bool,
) -> Vec<Value> {
    let leading = messages.iter().take_while(|message| has_role(message, "system")).count();
    let has_others = messages[leading..].iter().any(|message| has_role(message, "system"));
    if leading <= 1 && !has_others {
        return messages;
    }
    let mut messages = messages.into_iter();
    let leading: Vec<String> = messages.by_ref().take(leading).map(into_text).collect();
    let mut placed = Vec::new();
    if !leading.is_empty() {
        placed.push(json!({"role": "system", "content": leading.join(SEPARATOR)}));
    }
    let others = after_tool_results(messages);
    if has_others && (placed.is_empty() || !is_shown_inline()) {
        fold(others, &mut placed);
    } else {
        placed.extend(others);
    }
    placed
}

/// Moves a system message that is between tool calls and their results to the position after the results.
fn after_tool_results(messages: impl Iterator<Item = Value>) -> Vec<Value> {
    let (mut moved, mut held, mut after_calls) = (Vec::new(), Vec::new(), false);
    for message in messages {
        if has_role(&message, "system") && after_calls {
            held.push(message);
            continue;
        }
        if !has_role(&message, "system") && !has_role(&message, "tool") {
            moved.append(&mut held);
            after_calls = !message["tool_calls"].is_null();
        }
        moved.push(message);
    }
    moved.append(&mut held);
    moved
}

/// Appends messages to `placed`. The text of each system message is merged into the preceding user message or
/// tool result, or else into the following user message.
fn fold(messages: Vec<Value>, placed: &mut Vec<Value>) {
    let mut pending: Vec<String> = Vec::new();
    // Whether the last message in `placed` is a user message to which the text of a system message was
    // appended.
    let mut is_extended = false;
    for message in messages {
        if has_role(&message, "system") {
            let text = into_text(message);
            match placed.last_mut() {
                Some(last) if pending.is_empty() && takes_text(last) => {
                    append(last, SEPARATOR, &text);
                    is_extended = true;
                }
                _ => pending.push(text),
            }
            continue;
        }
        if !pending.is_empty() {
            push_user(&std::mem::take(&mut pending).join(SEPARATOR), placed);
            if has_role(&message, "user")
                && let Some(last) = placed.last_mut()
            {
                append(last, SEPARATOR, &into_text(message));
                is_extended = true;
                continue;
            }
        }
        let follows_user = placed.last().is_some_and(|last| has_role(last, "user"));
        if is_extended && follows_user && has_role(&message, "user") {
            push_user(&into_text(message), placed);
        } else {
            placed.push(message);
            is_extended = false;
        }
    }
    if !pending.is_empty() {
        push_user(&pending.join(SEPARATOR), placed);
    }
}

/// Appends a user message. Consecutive user messages are merged, as in Anthropic's API.
pub(crate) fn push_user(text: &str, messages: &mut Vec<Value>) {
    match messages.last_mut() {
        Some(last) if has_role(last, "user") => append(last, "\n", text),
        _ => messages.push(json!({"role": "user", "content": text})),
    }
}

fn has_role(message: &Value, role: &str) -> bool {
    message["role"] == role
}

fn takes_text(message: &Value) -> bool {
    has_role(message, "user") || has_role(message, "tool")
}

fn into_text(mut message: Value) -> String {
    match message["content"].take() {
        Value::String(text) => text,
        _ => String::new(),
    }
}

fn append(message: &mut Value, separator: &str, text: &str) {
    if let Some(Value::String(content)) = message.get_mut("content") {
        if !content.is_empty() {
            content.push_str(separator);
        }
        content.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(role: &str, content: &str) -> Value {
        match role {
            "call" => json!({"role": "assistant", "content": content, "tool_calls": [{}]}),
            _ => json!({"role": role, "content": content}),
        }
    }

    fn turns(list: &[[&str; 2]]) -> Vec<Value> {
        list.iter().map(|[role, content]| turn(role, content)).collect()
    }

    #[test]
    fn shown_system_turns_keep_their_place() {
        let sent = turns(&[["system", "S"], ["user", "a"], ["system", "T"], ["user", "b"]]);
        assert_eq!(place_system_turns(sent.clone(), || true), sent);
        let leading = turns(&[["system", "S"], ["system", "T"], ["user", "a"]]);
        let joined = turns(&[["system", "S\n\nT"], ["user", "a"]]);
        assert_eq!(place_system_turns(leading, || false), joined);
    }

    #[test]
    fn other_system_turns_become_part_of_their_neighbour() {
        let folded = |sent: &[[&str; 2]]| place_system_turns(turns(sent), || false);
        assert_eq!(
            folded(&[["system", "S"], ["user", "a"], ["system", "T"], ["assistant", "b"]]),
            turns(&[["system", "S"], ["user", "a\n\nT"], ["assistant", "b"]])
        );
        assert_eq!(
            folded(&[["user", "a"], ["assistant", "b"], ["system", "T"], ["user", "c"]]),
            turns(&[["user", "a"], ["assistant", "b"], ["user", "T\n\nc"]])
        );
        assert_eq!(
            folded(&[["user", "a"], ["call", "b"], ["system", "T"], ["tool", "c"], ["user", "d"]]),
            turns(&[["user", "a"], ["call", "b"], ["tool", "c\n\nT"], ["user", "d"]])
        );
        assert_eq!(
            folded(&[["user", "a"], ["assistant", "b"], ["system", "T"]]),
            turns(&[["user", "a"], ["assistant", "b"], ["user", "T"]])
        );
    }

    #[test]
    fn other_user_messages_remain_separate() {
        let sent = turns(&[["user", "a"], ["user", "b"], ["system", "T"], ["user", "c"]]);
        let placed = place_system_turns(sent, || false);
        assert_eq!(placed, turns(&[["user", "a"], ["user", "b\n\nT\nc"]]));
        let sent = turns(&[["system", "S"], ["call", "a"], ["tool", "b"], ["system", "T"]]);
        let user = [sent.clone(), turns(&[["user", "c"], ["user", "d"]])].concat();
        let placed = place_system_turns(user, || false);
        assert_eq!(placed[2..], turns(&[["tool", "b\n\nT"], ["user", "c"], ["user", "d"]]));
    }

    /// A system message in the middle is merged into a user message if the conversation does not start with
    /// a system prompt. Otherwise it would be the first system message, at which some templates print the
    /// tools.
    #[test]
    fn system_turn_without_system_prompt_is_folded() {
        let sent = turns(&[["user", "a"], ["system", "T"], ["user", "b"]]);
        let placed = place_system_turns(sent, || panic!("the template is not asked"));
        assert_eq!(placed, turns(&[["user", "a\n\nT\nb"]]));
    }

    /// The prompt of each turn is a prefix of the next turn's prompt, regardless of the appended messages.
    #[test]
    fn folding_extends_the_preceding_prompt() {
        let all = turns(&[
            ["system", "S"],
            ["user", "a"],
            ["system", "T"],
            ["call", "b"],
            ["tool", "c"],
            ["system", "U"],
            ["assistant", "d"],
            ["user", "e"],
            ["system", "V"],
        ]);
        let full = place_system_turns(all.clone(), || false);
        for length in [3, 6, 9] {
            let part = place_system_turns(all[..length].to_vec(), || false);
            assert_eq!(part[..], full[..part.len()], "{length} messages");
        }
    }
}
