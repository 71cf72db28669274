//! Writes log-probabilities in the three JSON forms of the API: chat, text completion and prompt.
//!
//! Log-probabilities are serialised one list entry at a time, because JSON values for all entries, or the
//! complete JSON text, would take ten times the memory of the log-probabilities.

use bytes::{BufMut, BytesMut};
use protocol::{Token, TokenLogprobs};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::io::Write as _;
use std::sync::Arc;
use text::Tokenizer;

/// Lowest log-probability written, because JSON cannot represent negative infinity.
const FLOOR: f32 = -9999.0;

/// How tokens are shown in log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenFormat {
    /// The text of the token.
    Text,
    /// The text `token_id:N`, where N is the token id.
    Id,
}

/// Formats tokens for log-probabilities.
#[derive(Debug, Clone)]
pub(crate) struct TokenFormatter {
    /// Tokenizer that provides the token texts.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether tokens are shown as text or as ids.
    pub token_format: TokenFormat,
}

impl TokenFormatter {
    /// Returns the text or id form in which the token is shown.
    pub(crate) fn of(&self, token: Token) -> Cow<'_, str> {
        match self.token_format {
            TokenFormat::Text => self.tokenizer.token_text(token),
            TokenFormat::Id => Cow::Owned(format!("token_id:{token}")),
        }
    }

    /// Returns the number of characters that begin in the token's text. A character whose bytes are spread
    /// over several tokens begins in the first of these tokens.
    pub(super) fn text_chars(&self, token: Token) -> usize {
        let bytes = self.tokenizer.token_bytes(token);
        bytes.iter().filter(|&&byte| byte & 0b1100_0000 != 0b1000_0000).count()
    }
}

/// Log-probabilities of one choice or of one chunk.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChoiceLogprobs<'a> {
    /// Token ids of the prompt if its tokens are listed before the output (`echo`), else empty.
    pub echoed: &'a [Token],
    /// Entries of the prompt tokens from the second token on; the first token has no log-probability.
    pub prompt: &'a [TokenLogprobs],
    /// Entries of the output tokens.
    pub output: &'a [TokenLogprobs],
}

/// Token for one list entry, and its log-probabilities, which the first prompt token does not have.
#[derive(Debug, Clone, Copy)]
struct LogprobRow<'a> {
    token: Token,
    entry: Option<&'a TokenLogprobs>,
}

impl<'a> ChoiceLogprobs<'a> {
    fn row(self, format: LogprobsFormat, index: usize) -> Option<LogprobRow<'a>> {
        let listed =
            |entry: &'a TokenLogprobs| LogprobRow { token: entry.token, entry: Some(entry) };
        if format == LogprobsFormat::Prompt {
            return self.prompt.get(index).map(listed);
        }
        let echoed = self.echoed.len().min(self.prompt.len() + 1);
        if index >= echoed {
            return self.output.get(index - echoed).map(listed);
        }
        let entry = index.checked_sub(1).map(|before| &self.prompt[before]);
        Some(LogprobRow { token: self.echoed[index], entry })
    }
}

/// JSON form in which log-probabilities are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogprobsFormat {
    /// `logprobs` object of a chat choice: one list with an object per token.
    Chat,
    /// `logprobs` object of a text completion choice: four lists with one value per token.
    Text,
    /// Value of `prompt_logprobs`: null for the first token, then `{"<id>": {..}}` per token.
    Prompt,
}

/// One list in the JSON form of log-probabilities, for example `token_logprobs` in a text completion.
struct LogprobColumn {
    /// JSON text before the first entry of the list; it also closes the preceding list.
    opening: &'static str,
    cell: LogprobColumnKind,
}

/// Kind of the values in a list of log-probabilities.
#[derive(Debug, Clone, Copy)]
enum LogprobColumnKind {
    ChatEntry,
    Name,
    Logprob,
    Top,
    Offset,
    Ranks,
}

const CHAT: &[LogprobColumn] =
    &[LogprobColumn { opening: "{\"content\":[", cell: LogprobColumnKind::ChatEntry }];
const TEXT: &[LogprobColumn] = &[
    LogprobColumn { opening: "{\"tokens\":[", cell: LogprobColumnKind::Name },
    LogprobColumn { opening: "],\"token_logprobs\":[", cell: LogprobColumnKind::Logprob },
    LogprobColumn { opening: "],\"top_logprobs\":[", cell: LogprobColumnKind::Top },
    LogprobColumn { opening: "],\"text_offset\":[", cell: LogprobColumnKind::Offset },
];
const PROMPT: &[LogprobColumn] =
    &[LogprobColumn { opening: "[null", cell: LogprobColumnKind::Ranks }];

impl LogprobsFormat {
    fn columns(self) -> &'static [LogprobColumn] {
        match self {
            Self::Chat => CHAT,
            Self::Text => TEXT,
            Self::Prompt => PROMPT,
        }
    }

    fn closing(self) -> &'static str {
        match self {
            Self::Chat | Self::Text => "]}",
            Self::Prompt => "]",
        }
    }
}

/// Writes the lists of log-probabilities in one JSON form, one list entry at a time.
#[derive(Debug)]
pub(crate) struct LogprobListWriter {
    format: LogprobsFormat,
    column: usize,
    row: usize,
    /// `text_offset` of the next list entry: number of characters of all tokens in earlier entries and
    /// chunks, counted in the token texts even if tokens are shown as ids.
    chars: usize,
}

impl LogprobListWriter {
    /// Creates a writer; `chars` is the number of characters of the choice's tokens in earlier chunks.
    pub(crate) fn new(format: LogprobsFormat, chars: usize) -> Self {
        Self { format, column: 0, row: 0, chars }
    }

    /// Appends the next list entry, or the end of a list; returns false once all lists are written.
    pub(crate) fn step(
        &mut self,
        names: &TokenFormatter,
        logprobs: ChoiceLogprobs<'_>,
        out: &mut BytesMut,
    ) -> bool {
        let columns = self.format.columns();
        let Some(column) = columns.get(self.column) else { return false };
        if self.row == 0 {
            out.put_slice(column.opening.as_bytes());
        }
        if let Some(listed) = logprobs.row(self.format, self.row) {
            if self.row > 0 || self.format == LogprobsFormat::Prompt {
                out.put_u8(b',');
            }
            self.row += 1;
            self.write_cell(column.cell, names, listed, out);
            return true;
        }
        self.row = 0;
        self.column += 1;
        if self.column == columns.len() {
            out.put_slice(self.format.closing().as_bytes());
        }
        self.column < columns.len()
    }

    /// Appends all lists; returns the number of characters of all tokens in this chunk and in earlier ones.
    pub(crate) fn write(
        mut self,
        names: &TokenFormatter,
        logprobs: ChoiceLogprobs<'_>,
        out: &mut BytesMut,
    ) -> usize {
        while self.step(names, logprobs, out) {}
        self.chars
    }

    fn write_cell(
        &mut self,
        cell: LogprobColumnKind,
        names: &TokenFormatter,
        listed: LogprobRow<'_>,
        out: &mut BytesMut,
    ) {
        let LogprobRow { token, entry } = listed;
        match cell {
            LogprobColumnKind::ChatEntry => {
                write_json(&entry.map(|entry| ChatTokenLogprob::with_top(names, entry)), out);
            }
            LogprobColumnKind::Name => write_json(&names.of(token), out),
            LogprobColumnKind::Logprob => {
                write_json(&entry.map(|entry| finite_logprob(entry.logprob)), out);
            }
            LogprobColumnKind::Top => {
                write_json(&entry.map(|entry| by_name(names, token, entry)), out);
            }
            LogprobColumnKind::Offset => {
                write_json(&self.chars, out);
                self.chars += names.text_chars(token);
            }
            LogprobColumnKind::Ranks => {
                if let Some(entry) = entry {
                    write_ranks(names, entry, out);
                }
            }
        }
    }
}

/// Returns a log-probability as f64, clamped to at least `FLOOR`. As in earlier versions of this server,
/// the JSON text has the digits of the f64 (−0.1 as f32 is written as −0.10000000149).
fn finite_logprob(logprob: f32) -> f64 {
    f64::from(logprob.max(FLOOR))
}

/// Serialises `value` to `out`. Errors are ignored, because writing to memory and serialising these types
/// cannot fail.
fn write_json(value: &impl Serialize, out: &mut BytesMut) {
    let _infallible = serde_json::to_writer(out.writer(), value);
}

/// JSON form of one token in a chat choice's log-probabilities.
#[derive(Serialize)]
struct ChatTokenLogprob<'a> {
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<ChatTokenLogprob<'a>>>,
}

impl<'a> ChatTokenLogprob<'a> {
    fn new(names: &'a TokenFormatter, id: Token, logprob: f32) -> Self {
        let bytes = names.tokenizer.token_bytes(id);
        Self { token: names.of(id), logprob: finite_logprob(logprob), bytes, top_logprobs: None }
    }

    fn with_top(names: &'a TokenFormatter, entry: &TokenLogprobs) -> Self {
        let top = entry.top_logprobs.iter().map(|&(id, logprob)| Self::new(names, id, logprob));
        let top_logprobs = Some(top.collect());
        Self { top_logprobs, ..Self::new(names, entry.token, entry.logprob) }
    }
}

/// Returns a map from token text (or `token_id:N`) to log-probability, for `token` and the top-k tokens at
/// its position. If two tokens have the same text, the first one is kept.
fn by_name(names: &TokenFormatter, token: Token, entry: &TokenLogprobs) -> Map<String, Value> {
    let mut map = Map::new();
    for &(id, logprob) in [(token, entry.logprob)].iter().chain(&entry.top_logprobs) {
        map.entry(names.of(id)).or_insert_with(|| json!(finite_logprob(logprob)));
    }
    map
}

/// Writes the log-probabilities and ranks of a prompt token and of the top-k tokens at its position, keyed by
/// token id.
fn write_ranks(names: &TokenFormatter, entry: &TokenLogprobs, out: &mut BytesMut) {
    let top = (1..).zip(&entry.top_logprobs).filter(|(_, (id, _))| *id != entry.token);
    let top = top.map(|(rank, &(id, logprob))| (id, logprob, rank));
    let mut opening = '{';
    for (id, logprob, rank) in [(entry.token, entry.logprob, entry.rank)].into_iter().chain(top) {
        let (logprob, name) = (json!(finite_logprob(logprob)), json!(names.of(id)));
        // Writing to memory cannot fail, so the result is ignored.
        let _ = write!(
            out.writer(),
            "{opening}\"{id}\":{{\"logprob\":{logprob},\"rank\":{rank},\"decoded_token\":{name}}}"
        );
        opening = ',';
    }
    out.put_u8(b'}');
}

#[cfg(test)]
mod tests;
