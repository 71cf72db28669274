//! Roles of the developer messages in a Responses request. As in chat completions, a developer message keeps its
//! role if the chat template shows it, and becomes a system message otherwise.

use crate::app::{AppState, ServingContext};
use crate::openai::chat::system_turns::place_system_turns;
use serde_json::{Value, json};

const DEVELOPER: &str = "developer";

/// Returns the messages of the prompt: developer messages have the role under which the chat template shows them,
/// and system messages are placed where it shows them. `has_tools`: the request defines tools.
pub(super) fn place_turns(
    app: &AppState,
    serving: &ServingContext,
    mut messages: Vec<Value>,
    has_tools: bool,
) -> Vec<Value> {
    let kept = match &serving.template {
        Some(template) if template.takes_developer(has_tools) => {
            let is_only_leading = !messages.iter().skip(1).any(is_developer);
            if is_only_leading || app.shows_inline_developer(serving) {
                messages.len()
            } else {
                usize::from(messages.first().is_some_and(is_developer))
            }
        }
        _ => 0,
    };
    for message in messages.iter_mut().skip(kept).filter(|message| is_developer(message)) {
        message["role"] = json!("system");
    }
    place_system_turns(messages, || app.shows_inline_system(serving))
}

fn is_developer(message: &Value) -> bool {
    message["role"] == DEVELOPER
}
