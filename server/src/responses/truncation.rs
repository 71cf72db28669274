//! `truncation: "auto"`: drops the oldest messages of a conversation until its prompt fits into the context
//! length.
//!
//! Messages are dropped in units, oldest first. Before the last user message, a unit is a turn: a user
//! message and the assistant's messages after it. After the last user message, a unit is an assistant message
//! and the outputs of its tool calls. System and developer messages, the last user message and the last unit
//! after it are never dropped.

use crate::api_error::ApiError;
use crate::app::ServingContext;
use crate::openai::chat::generation_start::prompt_token_count;
use crate::openai::chat::types::ChatCompletionRequest;
use serde_json::Value;
use std::collections::HashMap;
use text::ChatInput;

/// Order in which the messages of a conversation are dropped.
#[derive(Debug, PartialEq)]
struct MessageDropOrder {
    /// For each message, the index of its unit (messages that are dropped together, such as a turn); `None`
    /// = the message is never dropped.
    units: Vec<Option<usize>>,
    /// Number of units (groups of messages that are dropped together) that may be dropped.
    count: usize,
}

/// Drops the oldest messages until the prompt and the maximum number of output tokens fit into the context
/// length. Returns the messages of the prompt; `place` places system messages in a conversation. If the
/// prompt can never fit, nothing is dropped, and the request is rejected later.
///
/// Errors: an error of the chat template.
pub(super) fn truncate(
    serving: &ServingContext,
    request: &ChatCompletionRequest,
    messages: &[Value],
    place: impl Fn(Vec<Value>) -> Value,
) -> Result<Value, ApiError> {
    let order = MessageDropOrder::of(messages);
    let output_tokens = request.params.max_tokens.unwrap_or(1);
    let tokens_max = serving.field_bounds.max_model_len.saturating_sub(output_tokens) as usize;
    let dropped = order.units_to_drop(|dropped| {
        let input = ChatInput {
            messages: place(order.remaining(messages, dropped)),
            tools: request.tools.template_value.clone(),
            ..request.input.clone()
        };
        let count = prompt_token_count(serving, input, tokens_max, request.prompt_field)?;
        Ok(count.is_some())
    })?;
    Ok(place(order.remaining(messages, dropped)))
}

impl MessageDropOrder {
    fn of(messages: &[Value]) -> Self {
        let last_user = messages.iter().rposition(|message| message["role"] == "user");
        let (mut units, mut count) = (Vec::with_capacity(messages.len()), 0);
        let mut unit_of_call: HashMap<&str, usize> = HashMap::new();
        for (index, message) in messages.iter().enumerate() {
            let role = message["role"].as_str().unwrap_or_default();
            if matches!(role, "system" | "developer") || Some(index) == last_user {
                units.push(None);
                continue;
            }
            let is_in_last_turn = last_user.is_none_or(|last| index > last);
            let first_of_turn = last_user.is_some_and(|last| index == last + 1);
            let begins = if is_in_last_turn { role == "assistant" } else { role == "user" };
            let call_id = message["tool_call_id"].as_str();
            let unit_of_its_call = call_id.and_then(|id| unit_of_call.get(id).copied());
            let unit = unit_of_its_call.unwrap_or_else(|| {
                count += usize::from(begins || first_of_turn || count == 0);
                count - 1
            });
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                unit_of_call.extend(call["id"].as_str().map(|id| (id, unit)));
            }
            units.push(Some(unit));
        }
        Self { units, count }.keeping_the_last_unit()
    }

    /// Marks the last unit (group of messages that are dropped together) as never dropped, unless the
    /// conversation ends with the last user message.
    fn keeping_the_last_unit(mut self) -> Self {
        let Some(Some(last)) = self.units.last().copied() else { return self };
        for unit in &mut self.units {
            *unit = match *unit {
                Some(index) if index == last => None,
                Some(index) if index > last => Some(index - 1),
                other => other,
            };
        }
        self.count -= 1;
        self
    }

    /// Returns the smallest number of units (groups of messages) to drop so that the prompt fits into the
    /// context length; 0 if it never fits. `fits` returns whether the prompt fits after a given number of
    /// units is dropped.
    ///
    /// Errors: an error of `fits` for the whole conversation.
    fn units_to_drop(
        &self,
        fits: impl Fn(usize) -> Result<bool, ApiError>,
    ) -> Result<usize, ApiError> {
        if fits(0)? || self.count == 0 {
            return Ok(0);
        }
        // A chat template may reject a truncated conversation because of its first message. In this case,
        // the conversation counts as too long, so more messages are dropped.
        let fits = |dropped: usize| fits(dropped).unwrap_or(false);
        if !fits(self.count) {
            return Ok(0);
        }
        let (mut too_few, mut enough) = (0, self.count);
        while enough - too_few > 1 {
            let middle = usize::midpoint(too_few, enough);
            if fits(middle) {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        Ok(enough)
    }

    /// Returns the messages that remain after the oldest `dropped` units (groups of messages) are dropped.
    fn remaining(&self, messages: &[Value], dropped: usize) -> Vec<Value> {
        let is_kept = |unit: &Option<usize>| unit.is_none_or(|index| index >= dropped);
        let kept = messages.iter().zip(&self.units).filter(|(_, unit)| is_kept(unit));
        kept.map(|(message, _)| message.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns the unit (group of messages that are dropped together) of each message, and the number of
    /// droppable units. Messages are given by letters: `c1` calls tool 1, `t1` is the output of that call.
    fn units(conversation: &str) -> String {
        let message = |word: &str| {
            let id = word.get(1..).unwrap_or_default();
            match &word[..1] {
                "s" => json!({"role": "system"}),
                "u" => json!({"role": "user"}),
                "a" => json!({"role": "assistant"}),
                "c" => json!({"role": "assistant", "tool_calls": [{"id": id}]}),
                _ => json!({"role": "tool", "tool_call_id": id}),
            }
        };
        let messages: Vec<Value> = conversation.split(' ').map(message).collect();
        let order = MessageDropOrder::of(&messages);
        let name = |unit: &Option<usize>| unit.map_or("-".to_owned(), |unit| unit.to_string());
        format!("{} {}", order.units.iter().map(name).collect::<String>(), order.count)
    }

    #[test]
    fn units_are_turns_and_then_calls() {
        for (conversation, expected) in [
            ("s u a u a u", "-0011- 2"),
            ("u a s u", "00-- 1"),
            ("a u a u", "011- 2"),
            ("s u", "-- 0"),
            ("u c1 t1 c2 t2 c3 t3", "-0011-- 2"),
            ("u a u c1 t1 c2 t2 a", "00-1122- 3"),
            // The output of a tool call is always dropped together with the call, even if other messages
            // are between them.
            ("u c1 u t1 u", "0010- 2"),
            ("u c1 u t1", "---- 0"),
            ("u c1 t1 u c1 t1 u", "000111- 2"),
            ("c1 t1 c2 t2", "00-- 1"),
        ] {
            assert_eq!(units(conversation), expected, "{conversation}");
        }
    }

    #[test]
    fn oldest_units_are_dropped_first() {
        let messages: Vec<Value> = ["system", "user", "assistant", "user", "assistant", "user"]
            .map(|role| json!({"role": role}))
            .into();
        let order = MessageDropOrder::of(&messages);
        let left = |dropped| order.remaining(&messages, dropped).len();
        assert_eq!([left(0), left(1), left(2)], [6, 4, 2]);
    }

    #[test]
    fn the_smallest_number_of_units_is_dropped() {
        let order = MessageDropOrder { units: Vec::new(), count: 100 };
        for needed in [0, 1, 2, 50, 99, 100] {
            assert_eq!(order.units_to_drop(|dropped| Ok(dropped >= needed)), Ok(needed));
        }
        assert_eq!(order.units_to_drop(|_| Ok(false)), Ok(0));
        assert!(order.units_to_drop(|_| Err(ApiError::internal())).is_err());
    }
}
