//! Reasoning in a model's output: the text between two markers, such as `<think>` and `</think>`.
//!
//! If the prompt ends with the opening marker, the output starts inside the reasoning; if it ends with the
//! closing marker, the output has none. Otherwise the output of models that always reason starts inside the
//! reasoning, and the output of other models contains reasoning if it begins with the opening marker.

mod reader;
mod splitter;

pub use reader::TokenReasoningTracker;
pub(super) use reader::TrackedSections;
pub(super) use splitter::{OutputSection, ReasoningSplitter};

/// Reasoning format of a model family (`--reasoning-parser`). The crate's module `families` defines the formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningFamily {
    /// Command-line name, different for each format.
    name: &'static str,
    /// All forms of the markers.
    markers: &'static [ReasoningMarkers],
    /// Special tokens that are parts of a marker.
    marker_parts: &'static [&'static str],
    /// Whether an output starts inside the reasoning unless the prompt ends with the closing marker.
    always_reasons: bool,
    /// Text that ends the reasoning and begins the answer, if reasoning may begin again after the closing marker. Only in
    /// the harmony format.
    answer_opening: Option<&'static str>,
}

/// Markers around the reasoning of a model family. Each may be a special token of the tokenizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningMarkers {
    /// Marker that opens the reasoning.
    pub open: &'static str,
    /// Marker that closes the reasoning; the content follows it.
    pub close: &'static str,
}

/// Whether an output starts inside its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningStart {
    /// The output starts inside the reasoning; the opening marker may still follow.
    Inside,
    /// The output has no reasoning, because the prompt ends with the closing marker.
    After,
    /// The output has reasoning if it begins with the opening marker.
    AtMarker,
}

/// How the reasoning of one output is parsed.
#[derive(Debug, Clone, Copy)]
pub struct ReasoningParserOptions {
    /// Reasoning format of the model.
    pub family: ReasoningFamily,
    /// Reasoning state at the start of the output.
    pub start: ReasoningStart,
}

impl ReasoningFamily {
    /// Defines a format in which an output has reasoning if it begins with an opening marker, or if the prompt ends with
    /// one.
    pub(crate) const fn new(name: &'static str, markers: &'static [ReasoningMarkers]) -> Self {
        Self { name, markers, marker_parts: &[], always_reasons: false, answer_opening: None }
    }

    /// Sets the special tokens that are parts of a marker.
    pub(crate) const fn with_marker_parts(self, marker_parts: &'static [&'static str]) -> Self {
        Self { marker_parts, ..self }
    }

    /// Lets an output start inside the reasoning unless the prompt ends with the closing marker.
    pub(crate) const fn always_reasoning(self) -> Self {
        Self { always_reasons: true, ..self }
    }

    /// Makes this the harmony format, in which `answer_opening` ends the reasoning and begins the answer.
    pub(crate) const fn with_answer_opening(self, answer_opening: &'static str) -> Self {
        Self { answer_opening: Some(answer_opening), ..self }
    }

    /// Returns the command-line name of the format.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Whether this is the harmony format, in which reasoning may also follow content.
    pub fn is_harmony(self) -> bool {
        self.answer_opening.is_some()
    }

    /// Returns the markers around the reasoning.
    pub fn markers(self) -> ReasoningMarkers {
        self.markers[0]
    }

    /// Returns all forms of the markers around the reasoning: some models write the markers in several forms.
    pub fn all_markers(self) -> &'static [ReasoningMarkers] {
        self.markers
    }

    /// Returns the special tokens of which the markers consist.
    pub(super) fn special_tokens(self) -> Vec<&'static str> {
        let markers = self.markers.iter().flat_map(|markers| [markers.open, markers.close]);
        markers.chain(self.marker_parts.iter().copied()).collect()
    }

    /// Returns the text that ends the reasoning and begins the answer, if reasoning may begin again after the
    /// closing marker; `None` if it cannot.
    pub fn answer_opening(self) -> Option<&'static str> {
        self.answer_opening
    }

    /// Returns the end offset of the last opening marker in `text`.
    fn last_open(self, text: &str) -> Option<usize> {
        let ends = self.all_markers().iter();
        ends.filter_map(|one| text.rfind(one.open).map(|at| at + one.open.len())).max()
    }

    /// Returns the end offset of the last closing marker in `text`.
    fn last_close(self, text: &str) -> Option<usize> {
        let ends = self.all_markers().iter();
        ends.filter_map(|one| text.rfind(one.close).map(|at| at + one.close.len())).max()
    }

    /// Returns the reasoning state at the start of an output; `prompt_tail` is the end of the rendered
    /// prompt.
    pub fn start_after_prompt(self, prompt_tail: &str) -> ReasoningStart {
        let is_open = |tail: &str| self.last_open(tail) == Some(tail.len());
        // The marker may end with white space.
        let (whole_tail, prompt_tail) = (prompt_tail, prompt_tail.trim_end());
        if is_open(whole_tail) || is_open(prompt_tail) {
            return ReasoningStart::Inside;
        }
        if self.is_harmony() {
            // A template may also begin the answer. Otherwise the prompt ends with `<|start|>assistant`.
            let header = prompt_tail.rfind("<|start|>").map_or("", |at| &prompt_tail[at..]);
            let is_answer = header.contains("<|message|>") && !header.contains("<|end|>");
            return if is_answer { ReasoningStart::After } else { ReasoningStart::AtMarker };
        }
        if self.last_close(prompt_tail) == Some(prompt_tail.len()) {
            return ReasoningStart::After;
        }
        if self.always_reasons { ReasoningStart::Inside } else { ReasoningStart::AtMarker }
    }

    /// Returns the text after the last opening marker in `message`, an assistant message whose reasoning the
    /// model is to continue.
    pub fn trailing_reasoning(self, message: &str) -> &str {
        self.last_open(message).map_or("", |end| &message[end..])
    }

    /// Returns the reasoning state at the start of an output that continues the assistant message `message`.
    pub fn start_after_message(self, message: &str) -> ReasoningStart {
        if self.is_harmony() {
            return ReasoningStart::After;
        }
        match (self.last_open(message), self.last_close(message)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => self.start_after_prompt(""),
            _ => ReasoningStart::After,
        }
    }
}
