//! Determines by trial renderings whether a chat template includes system or developer messages in the middle of
//! a conversation in its output.

use super::{ChatInput, ChatTemplate};
use serde_json::{Value, json};

/// Text of the inserted message in the trial conversations; it occurs in no published template.
const NOTE: &str = "qzxnote";

/// Conversation for a trial rendering, with the index at which a message is inserted.
struct TrialConversation {
    messages: Vec<Value>,
    /// Index of the inserted message.
    index: usize,
}

impl ChatTemplate {
    /// Whether the template renders a message of the role `role` (`system` or `developer`) in the middle and at
    /// the end of a conversation as a separate message: with a role marker, not as a user message, and without
    /// changes to the surrounding text.
    pub fn shows_inline(&self, role: &str) -> bool {
        let shows =
            |tools: &Value| trials().iter().all(|trial| self.shows_insertion(role, trial, tools));
        shows(&Value::Null) && shows(&json!([trial_tool()]))
    }

    fn shows_insertion(&self, role: &str, trial: &TrialConversation, tools: &Value) -> bool {
        let render = |note: Option<Value>| {
            let mut messages = trial.messages.clone();
            if let Some(note) = note {
                messages.insert(trial.index, note);
            }
            let (messages, tools) = (Value::Array(messages), tools.clone());
            let add_generation_prompt = true;
            let input =
                ChatInput { messages, tools, add_generation_prompt, ..ChatInput::default() };
            self.render(input).ok().map(|rendered| rendered.text)
        };
        let note = |role: &str| json!({"role": role, "content": NOTE});
        let (Some(before), Some(after)) = (render(None), render(Some(note(role)))) else {
            return false;
        };
        let preceding = trial.messages[trial.index - 1]["content"].as_str().unwrap_or_default();
        let is_message = insertion(&before, &after).is_some_and(|insertion| {
            insertion.preceding.contains(preceding)
                && insertion.text.matches(NOTE).count() == 1
                && insertion.text.trim() != NOTE
        });
        // Whether the message follows the opening of an assistant turn at the end of the prompt; the model
        // would then continue the message.
        let is_last = trial.index == trial.messages.len();
        let ends_prompt = is_last && after.starts_with(&before);
        is_message && !ends_prompt && render(Some(note("user"))).as_ref() != Some(&after)
    }
}

/// Text that was inserted, and the text before it.
#[derive(Debug, PartialEq, Eq)]
struct TextInsertion {
    preceding: String,
    text: String,
}

/// Returns the single insertion that turns `before` into `after`; `None` if the texts differ in another way.
fn insertion(before: &str, after: &str) -> Option<TextInsertion> {
    let (old, new) = (before.as_bytes(), after.as_bytes());
    let inserted = new.len().checked_sub(old.len())?;
    let prefix = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let is_insertion = new[prefix + inserted..] == old[prefix..];
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    is_insertion.then(|| TextInsertion {
        preceding: lossy(&new[..prefix]),
        text: lossy(&new[prefix..prefix + inserted]),
    })
}

fn trials() -> [TrialConversation; 3] {
    let system = json!({"role": "system", "content": "qzxsystem"});
    let user = |text: &str| json!({"role": "user", "content": text});
    let answer = json!({"role": "assistant", "content": "qzxanswer"});
    let call = json!({"id": "qzxcall01", "type": "function",
        "function": {"name": "qzxtool", "arguments": {"qzxkey": "qzxvalue"}}});
    let calling = json!({"role": "assistant", "content": "", "reasoning_content": "qzxthought",
        "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_call_id": "qzxcall01", "name": "qzxtool",
        "content": "qzxresult"});
    let between = vec![system.clone(), user("qzxfirst"), answer, user("qzxsecond")];
    let after_result = vec![system.clone(), user("qzxfirst"), calling, result];
    [
        TrialConversation { messages: between, index: 3 },
        TrialConversation { messages: after_result, index: 4 },
        TrialConversation { messages: vec![system, user("qzxfirst")], index: 2 },
    ]
}

fn trial_tool() -> Value {
    let parameters = json!({"type": "object", "properties": {"qzxkey": {"type": "string"}}});
    json!({"type": "function", "function": {"name": "qzxtool", "description": "qzxdescription",
        "parameters": parameters}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_insertions_are_found() {
        let found =
            |before, after| insertion(before, after).map(|found| [found.preceding, found.text]);
        let expected = |preceding: &str, text: &str| Some([preceding.to_owned(), text.to_owned()]);
        assert_eq!(found("<a><b>", "<a><c><b>"), expected("<a><", "c><"));
        assert_eq!(found("ab", "abc"), expected("ab", "c"));
        assert_eq!(found("ab", "ab"), expected("ab", ""));
        assert_eq!(found("ab", "ac"), None);
        assert_eq!(found("ab", "cabd"), None);
        assert_eq!(found("abc", "ab"), None);
    }
}
