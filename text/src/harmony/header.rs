//! Header of a harmony message, which is read character by character and marker by marker:
//! `<|start|>ROLE to=RECIPIENT<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>`. All parts are
//! optional; the recipient comes before or after the channel, and the content type may follow without
//! `<|constrain|>`.
//!
//! Text that cannot belong to a header is recognised as early as possible, because it is content.

use super::{FUNCTIONS, HarmonyMarker};

/// Maximum length of a header in bytes.
const HEADER_MAX: usize = 512;
/// Text before the recipient.
const TO: &str = "to=";

/// Part of a header, determined by the last marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeaderPart {
    /// Before the first marker.
    Lead,
    /// After `<|start|>`.
    Role,
    /// After `<|channel|>`.
    Channel,
    /// After `<|constrain|>`.
    Format,
}

/// Channel of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HarmonyChannel {
    Analysis,
    Commentary,
    /// `final`, or a name that the format does not define.
    Answer,
}

/// What a message is, as its header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HarmonyMessageKind {
    /// Reasoning: the channel `analysis`, and messages that are neither for the user nor calls.
    Reasoning,
    /// Content before tool calls: the channel `commentary`.
    Preamble,
    /// Content.
    Answer,
    /// Call of the function with this name.
    Call(String),
}

/// State of a header after the next character or marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderStatus {
    /// The header continues, or is complete after `<|message|>`.
    Valid,
    /// The text is not a header.
    Malformed,
}

/// Header of one message, as far as it has been read.
#[derive(Debug, Clone)]
pub(super) struct HarmonyHeader {
    /// Byte offset in the output at which the header begins.
    pub from: usize,
    /// Text of the header, including its markers.
    pub text: String,
    part: HeaderPart,
    /// Number of complete words in this part.
    words: usize,
    /// Offset in `text` of the incomplete word at the end; `None` = the text ends with a separator.
    word: Option<usize>,
    /// Whether the author is the model; false for the messages of other roles, which models invent.
    is_assistant: bool,
    channel: Option<HarmonyChannel>,
    recipient: Option<String>,
    /// Offset in `text` of a word after the channel that is not a recipient. It is a content type if the
    /// header is valid; otherwise the text of the message begins with it.
    free: Option<usize>,
}

impl HarmonyHeader {
    /// Creates a header that begins at byte `from` of the output, before its first marker.
    pub(super) fn new(from: usize) -> Self {
        Self {
            from,
            text: String::new(),
            part: HeaderPart::Lead,
            words: 0,
            word: None,
            is_assistant: true,
            channel: None,
            recipient: None,
            free: None,
        }
    }

    /// Adds the next character, which does not belong to a marker.
    pub(super) fn push(&mut self, c: char) -> HeaderStatus {
        let ended = if c.is_whitespace() { self.end_word() } else { HeaderStatus::Valid };
        let is_separator = c == ' ' || c.is_whitespace() && self.is_blank();
        let status = if is_separator || ended == HeaderStatus::Malformed {
            ended
        } else {
            self.word_char(c)
        };
        self.text.push(c);
        if self.text.len() > HEADER_MAX { HeaderStatus::Malformed } else { status }
    }

    /// Adds the marker `<|channel|>`, `<|constrain|>` or `<|message|>`, or the marker `<|start|>` at the
    /// beginning.
    pub(super) fn marker(&mut self, marker: HarmonyMarker) -> HeaderStatus {
        let is_too_long = self.text.len() + marker.text().len() > HEADER_MAX;
        if self.end_word() == HeaderStatus::Malformed || is_too_long {
            return HeaderStatus::Malformed;
        }
        self.text.push_str(marker.text());
        self.words = 0;
        self.part = match marker {
            HarmonyMarker::Start => HeaderPart::Role,
            HarmonyMarker::Channel => HeaderPart::Channel,
            _ => HeaderPart::Format,
        };
        HeaderStatus::Valid
    }

    /// Whether the header has no text but whitespace.
    pub(super) fn is_blank(&self) -> bool {
        self.part == HeaderPart::Lead && self.words == 0 && self.word.is_none()
    }

    /// Whether the header has no marker.
    pub(super) fn is_lead(&self) -> bool {
        self.part == HeaderPart::Lead
    }

    /// Whether the header is text without a marker, and not only whitespace.
    pub(super) fn is_unmarked_text(&self) -> bool {
        self.is_lead() && !self.is_blank()
    }

    /// Whether a part of the header may be the text of a message, if no `<|message|>` follows.
    pub(super) fn has_text(&self) -> bool {
        self.is_unmarked_text()
            || self.recipient.is_none() && (self.free.is_some() || self.has_free_word())
    }

    /// Whether the text ends with an incomplete word that is neither a role, a channel nor a recipient.
    fn has_free_word(&self) -> bool {
        let is_free = |start: usize| !self.text[start..].starts_with(TO);
        self.part == HeaderPart::Channel && self.words > 0 && self.word.is_some_and(is_free)
    }

    /// Returns the offset in `text` at which the text of the message begins if the header is malformed;
    /// `None` if nothing of it is a header.
    pub(super) fn text_start(&self) -> Option<usize> {
        let is_header = self.channel.is_some() || self.recipient.is_some();
        (is_header && !self.is_lead()).then(|| self.free.or(self.word).unwrap_or(self.text.len()))
    }

    /// Returns what the message is. `functions` are the names of the functions that the model may call;
    /// `None` = calls are not parsed.
    pub(super) fn message_kind(&self, functions: Option<&[String]>) -> HarmonyMessageKind {
        if !self.is_assistant {
            return HarmonyMessageKind::Reasoning;
        }
        if let Some(recipient) = self.recipient.as_deref().filter(|name| *name != "all") {
            let is_known = |name: &&str| functions.is_some_and(|all| all.iter().any(|f| f == name));
            let name = match recipient.strip_prefix(FUNCTIONS) {
                Some(name) => Some(name).filter(|name| !name.is_empty()),
                None => Some(recipient).filter(is_known),
            };
            return match name {
                Some(name) if functions.is_some() => HarmonyMessageKind::Call(name.to_owned()),
                Some(_) => HarmonyMessageKind::Answer,
                None => HarmonyMessageKind::Reasoning,
            };
        }
        match self.channel {
            Some(HarmonyChannel::Analysis) => HarmonyMessageKind::Reasoning,
            Some(HarmonyChannel::Commentary) => HarmonyMessageKind::Preamble,
            Some(HarmonyChannel::Answer) | None => HarmonyMessageKind::Answer,
        }
    }

    /// Whether the first word of this part has a meaning of its own: a role, a channel or a content type.
    fn names_part(&self) -> bool {
        self.words == 0 && self.part != HeaderPart::Lead
    }

    /// Checks a character that belongs to a word, before it is added to the text.
    fn word_char(&mut self, c: char) -> HeaderStatus {
        let start = *self.word.get_or_insert(self.text.len());
        let word = &self.text[start..];
        let is_name = c.is_alphanumeric() || "_-.:/".contains(c);
        let may_be_free = self.part == HeaderPart::Channel && self.free.is_none();
        let is_valid = if word.len() < TO.len() && !self.names_part() && TO.starts_with(word) {
            TO[word.len()..].starts_with(c) || may_be_free && is_name
        } else {
            is_name && (self.names_part() || word.starts_with(TO) || may_be_free)
        };
        if is_valid {
            return HeaderStatus::Valid;
        }
        let is_known = matches!(word, "analysis" | "commentary" | "final");
        if is_known && self.part == HeaderPart::Channel && self.words == 0 {
            // The text of the message follows the channel immediately.
            self.end_word();
            self.word = Some(self.text.len());
        }
        HeaderStatus::Malformed
    }

    /// Ends the word at the end of the text, if there is one.
    fn end_word(&mut self) -> HeaderStatus {
        let Some(start) = self.word else { return HeaderStatus::Valid };
        let word = &self.text[start..];
        if self.names_part() {
            match self.part {
                HeaderPart::Role => {
                    self.is_assistant = word.split(':').next() == Some("assistant");
                }
                HeaderPart::Channel => self.channel = Some(channel(word)),
                HeaderPart::Lead | HeaderPart::Format => {}
            }
        } else if let Some(name) = word.strip_prefix(TO).filter(|name| !name.is_empty()) {
            self.recipient = Some(name.to_owned());
        } else if self.part != HeaderPart::Channel || self.free.is_some() {
            return HeaderStatus::Malformed;
        } else if word.starts_with(FUNCTIONS) && self.recipient.is_none() {
            self.recipient = Some(word.to_owned());
        } else {
            self.free = Some(start);
        }
        self.words += 1;
        self.word = None;
        HeaderStatus::Valid
    }
}

fn channel(name: &str) -> HarmonyChannel {
    match name {
        "analysis" => HarmonyChannel::Analysis,
        "commentary" => HarmonyChannel::Commentary,
        _ => HarmonyChannel::Answer,
    }
}
