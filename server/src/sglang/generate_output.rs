//! Output of one choice of a `/generate` request in SGLang's JSON form.

use super::generate_fields::GenerateLogprobOptions;
use crate::openai::choice::{ChoiceFinishReason, StopMatch};
use crate::openai::logprobs::TokenFormatter;
use crate::openai::usage::UsageInfo;
use protocol::{Token, TokenLogprobs};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Instant;

/// Metadata shared by all outputs of a `/generate` request.
pub(super) struct GenerateMeta {
    pub(super) request_id: String,
    pub(super) weight_version: String,
    /// Whether the reply is a list; each output then has its own id.
    pub(super) is_batch: bool,
    pub(super) logprobs: Option<GenerateLogprobOptions>,
    pub(super) tokens: TokenFormatter,
    pub(super) received: Instant,
}

/// Output of one choice so far. Each event of a stream repeats the whole output.
#[derive(Default)]
pub(super) struct GenerateOutput {
    pub(super) text: String,
    pub(super) ids: Vec<Token>,
    /// Entries of the list `output_token_logprobs` so far, as comma-separated JSON text.
    rows: String,
    /// Entries of the list `output_top_logprobs` so far, as comma-separated JSON text.
    top_rows: String,
    pub(super) end: Option<ChoiceFinishReason>,
}

impl GenerateOutput {
    /// Creates the output of a choice that has ended, without log-probabilities.
    pub(super) fn ended(text: String, ids: Vec<Token>, end: ChoiceFinishReason) -> Self {
        Self { text, ids, end: Some(end), ..Self::default() }
    }

    /// Appends the log-probabilities of new tokens.
    pub(super) fn push_logprobs(&mut self, meta: &GenerateMeta, entries: &[TokenLogprobs]) {
        let Some(logprobs) = meta.logprobs else { return };
        for entry in entries {
            push_row(&mut self.rows, &row(meta, logprobs, Some(entry.logprob), entry.token));
            if logprobs.top > 0 {
                push_row(&mut self.top_rows, &top_row(meta, logprobs, entry));
            }
        }
    }

    /// Returns the JSON object of the output. `prompt_logprobs` contains JSON members with the prompt
    /// log-probabilities.
    pub(super) fn json(
        &self,
        meta: &GenerateMeta,
        index: usize,
        usage: &UsageInfo,
        prompt_logprobs: &str,
    ) -> String {
        let suffix = if meta.is_batch { format!("_{index}") } else { String::new() };
        let id = format!("{}{suffix}", meta.request_id);
        let finish = finish_reason(self.end.as_ref(), self.ids.last().copied(), self.ids.len());
        let seconds = meta.received.elapsed().as_secs_f64();
        let mut members = format!(
            "\"id\":{},\"finish_reason\":{finish},\"prompt_tokens\":{},\"weight_version\":{},\
             \"completion_tokens\":{},\"cached_tokens\":{},\"e2e_latency\":{seconds}",
            json!(id),
            usage.prompt_tokens,
            json!(meta.weight_version),
            usage.completion_tokens,
            usage.cached_tokens,
        );
        if let Some(logprobs) = meta.logprobs {
            members.push_str(prompt_logprobs);
            self.write_logprobs(logprobs, &mut members);
        }
        let index = if meta.is_batch { format!("\"index\":{index},") } else { String::new() };
        let (text, ids) = (json!(self.text), json!(self.ids));
        format!("{{{index}\"text\":{text},\"output_ids\":{ids},\"meta_info\":{{{members}}}}}")
    }

    /// Appends the JSON members with the log-probabilities of the output to `members`.
    fn write_logprobs(&self, logprobs: GenerateLogprobOptions, members: &mut String) {
        // Writing to a string cannot fail, so the result is ignored.
        let _ = write!(members, ",\"output_token_logprobs\":[{}]", self.rows);
        if logprobs.top > 0 {
            let _ = write!(members, ",\"output_top_logprobs\":[{}]", self.top_rows);
        }
    }
}

/// Returns the JSON members with the prompt log-probabilities; empty if no log-probabilities were requested.
/// `entries` start at the second prompt token, because the first has no log-probability.
pub(super) fn prompt_members(
    meta: &GenerateMeta,
    prompt: &[Token],
    entries: &[TokenLogprobs],
) -> String {
    let Some(logprobs) = meta.logprobs else { return String::new() };
    let (mut rows, mut top_rows) = (String::new(), String::new());
    let start = logprobs.prompt_start.unwrap_or(prompt.len());
    for (at, &token) in prompt.iter().enumerate().skip(start) {
        let entry = at.checked_sub(1).and_then(|at| entries.get(at));
        let logprob = entry.map(|entry| entry.logprob);
        push_row(&mut rows, &row(meta, logprobs, logprob, token));
        let top = entry.map_or("null".to_owned(), |entry| top_row(meta, logprobs, entry));
        push_row(&mut top_rows, &top);
    }
    let mut members = format!(",\"input_token_logprobs\":[{rows}]");
    if logprobs.top > 0 {
        // Writing to a string cannot fail, so the result is ignored.
        let _ = write!(members, ",\"input_top_logprobs\":[{top_rows}]");
    }
    members
}

fn push_row(rows: &mut String, row: &str) {
    if !rows.is_empty() {
        rows.push(',');
    }
    rows.push_str(row);
}

/// Returns the JSON list `[logprob, token id, text]` for one token.
fn row(
    meta: &GenerateMeta,
    logprobs: GenerateLogprobOptions,
    logprob: Option<f32>,
    token: Token,
) -> String {
    let text = if logprobs.with_text { json!(meta.tokens.of(token)) } else { Value::Null };
    let logprob = logprob.filter(|logprob| logprob.is_finite());
    format!("[{},{token},{text}]", logprob.map_or("null".to_owned(), |value| value.to_string()))
}

fn top_row(meta: &GenerateMeta, logprobs: GenerateLogprobOptions, entry: &TokenLogprobs) -> String {
    let mut rows = String::new();
    for &(token, logprob) in &entry.top_logprobs {
        push_row(&mut rows, &row(meta, logprobs, Some(logprob), token));
    }
    format!("[{rows}]")
}

/// Returns the value of `finish_reason`; null while the output continues.
pub(super) fn finish_reason(
    end: Option<&ChoiceFinishReason>,
    last: Option<Token>,
    tokens: usize,
) -> Value {
    let stopped = |matched: Value| json!({"type": "stop", "matched": matched});
    match end {
        None => Value::Null,
        Some(ChoiceFinishReason::Length) => json!({"type": "length", "length": tokens}),
        Some(ChoiceFinishReason::Stop(stop) | ChoiceFinishReason::Calls(stop)) => match stop {
            StopMatch::Eos => stopped(json!(last)),
            StopMatch::Id(id) => stopped(json!(id)),
            StopMatch::Text(text) => stopped(json!(text)),
        },
        Some(end) => json!({"type": "abort", "message": end.name()}),
    }
}
