//! Errors for requests that exceed the context length. The messages have the wording of OpenAI's and
//! Anthropic's APIs, because clients recognise it and then shorten the conversation or lower the maximum
//! output length.

use super::api_error::ApiError;

/// Value of `code` and `reason` in errors about the context length.
pub(crate) const CONTEXT_LENGTH_EXCEEDED: &str = "context_length_exceeded";

/// Remark in errors of the OpenAI routes about a prompt whose tokens were not counted.
const LOWER_BOUND_REMARK: &str =
    " The prompt was not tokenized, so its number of tokens is a lower bound.";

/// Token counts of a request that exceeds the context length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextOverflow {
    /// Number of prompt tokens, or a lower bound of this number.
    pub prompt_tokens: u64,
    /// Whether `prompt_tokens` is a lower bound, because the prompt was not tokenised.
    pub is_lower_bound: bool,
    /// Maximum number of output tokens; 1 if the request sets none.
    pub max_tokens: u32,
    /// Maximum number of prompt tokens and output tokens in total.
    pub context_length: u32,
}

impl ContextOverflow {
    /// Returns the error message in the wording of OpenAI's API, and the value of `code`: recent versions of the
    /// openai package show only the message, in which langchain-openai searches for the code. A remark about a
    /// lower bound follows at the end, because clients read the counts from the sentence.
    pub fn openai_message(&self) -> String {
        let Self { prompt_tokens, max_tokens, context_length, is_lower_bound } = self;
        let total = prompt_tokens + u64::from(*max_tokens);
        let remark = if *is_lower_bound { LOWER_BOUND_REMARK } else { "" };
        format!(
            "This model's maximum context length is {context_length} tokens. However, you requested \
             {total} tokens ({prompt_tokens} in the messages, {max_tokens} in the completion). Please \
             reduce the length of the messages or completion. ({CONTEXT_LENGTH_EXCEEDED}){remark}"
        )
    }

    /// Returns the error message in the wording of Anthropic's API. The message has no other text, because clients
    /// compare it from its beginning to its end.
    pub fn anthropic_message(&self) -> String {
        let Self { prompt_tokens, max_tokens, context_length, .. } = self;
        if *prompt_tokens > u64::from(*context_length) {
            return format!(
                "prompt is too long: {prompt_tokens} tokens > {context_length} maximum"
            );
        }
        format!(
            "input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > \
             {context_length}, decrease input length or `max_tokens` and try again"
        )
    }

    /// Creates the 400 error; `param` is the field that contains the prompt, as in OpenAI's API.
    pub(crate) fn into_error(self, param: &str) -> ApiError {
        let error = ApiError::bad_request(CONTEXT_LENGTH_EXCEEDED, param, self.openai_message());
        ApiError { context_overflow: Some(self), ..error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::anthropic;
    use serde_json::Value;

    const TOO_LONG: ContextOverflow = ContextOverflow {
        prompt_tokens: 5_000,
        is_lower_bound: false,
        max_tokens: 16,
        context_length: 4_096,
    };
    const TOO_LONG_TOGETHER: ContextOverflow =
        ContextOverflow { prompt_tokens: 4_000, max_tokens: 1_000, ..TOO_LONG };
    const AT_LEAST: ContextOverflow = ContextOverflow { is_lower_bound: true, ..TOO_LONG };

    fn bodies(overflow: ContextOverflow) -> [Value; 2] {
        let error = overflow.into_error("messages");
        [error.body(), anthropic::error::body(&error)]
            .map(|body| serde_json::from_str(&body).unwrap())
    }

    #[test]
    fn sentences_are_those_of_both_apis() {
        let [openai, anthropic] = bodies(TOO_LONG);
        assert_eq!(
            openai["error"]["message"],
            "This model's maximum context length is 4096 tokens. However, you requested 5016 tokens \
             (5000 in the messages, 16 in the completion). Please reduce the length of the messages \
             or completion. (context_length_exceeded)"
        );
        assert_eq!(openai["error"]["code"], "context_length_exceeded");
        assert_eq!(openai["error"]["param"], "messages");
        let message = "prompt is too long: 5000 tokens > 4096 maximum";
        assert_eq!(anthropic["error"]["message"], message);
        assert_eq!(AT_LEAST.anthropic_message(), message);
        assert_eq!(
            TOO_LONG_TOGETHER.anthropic_message(),
            "input length and `max_tokens` exceed context limit: 4000 + 1000 > 4096, decrease input \
             length or `max_tokens` and try again"
        );
        let remarked = AT_LEAST.openai_message();
        assert_eq!(remarked.strip_suffix(LOWER_BOUND_REMARK), Some(&*TOO_LONG.openai_message()));
    }

    /// Texts by which clients recognise the errors, in lower case: Claude Code 2.1, OpenRouter's and Groq's
    /// patterns in pi-ai. `tests/conformance/clients/overflow_errors.py` runs the code of litellm and LangChain.
    #[test]
    fn clients_recognise_the_errors() {
        let contains = |body: &Value, words: &[&str]| {
            let text = body.to_string().replace("\":\"", "\": \"").to_lowercase();
            for word in words {
                assert!(text.contains(word), "{word}: {text}");
            }
        };
        for overflow in [TOO_LONG, TOO_LONG_TOGETHER, AT_LEAST] {
            let [openai, anthropic] = bodies(overflow);
            contains(
                &openai,
                &[
                    "this model's maximum context length is",
                    "maximum context length is 4096 tokens",
                    "\"code\": \"context_length_exceeded\"",
                    "completion. (context_length_exceeded)",
                    "reduce the length of the messages",
                ],
            );
            if overflow == TOO_LONG_TOGETHER {
                contains(&anthropic, &["exceed context limit: 4000 + 1000 > 4096"]);
                contains(&anthropic, &["input length and `max_tokens` exceed context limit"]);
            } else {
                contains(&anthropic, &["prompt is too long"]);
                assert_eq!(claude_code_counts(&anthropic), Some([5_000, 4_096]));
            }
        }
    }

    /// Parses the counts as Claude Code does: `prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)`.
    fn claude_code_counts(body: &Value) -> Option<[u64; 2]> {
        let message = body["error"]["message"].as_str()?;
        let (_, rest) = message.split_once("prompt is too long")?;
        let rest = rest.trim_start_matches(|c: char| !c.is_ascii_digit());
        let (prompt, rest) = rest.split_once(" tokens > ")?;
        let limit = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        Some([prompt.parse().ok()?, limit.parse().ok()?])
    }

    /// A prompt of exactly the context length leaves no room for an output token. The token counts in both
    /// error messages must then still exceed the context length.
    #[test]
    fn prompt_of_exactly_the_context_length_leaves_no_output() {
        let full = ContextOverflow { prompt_tokens: 4_096, max_tokens: 1, ..TOO_LONG };
        assert!(full.openai_message().contains("you requested 4097 tokens"));
        assert!(full.anthropic_message().contains("4096 + 1 > 4096"));
    }
}
