//! Splits an output into reasoning and content, character by character.

use super::{ReasoningParserOptions, ReasoningStart};
use crate::tool_calls::MarkerScanner;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SplitterState {
    /// The output is only whitespace and a prefix of the opening marker so far.
    Start {
        inside: bool,
    },
    Inside,
    After,
}

/// Section of the output that a character belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputSection {
    Reasoning,
    Content,
}

/// Splits one output into reasoning and content, one character at a time.
#[derive(Debug, Clone)]
pub(crate) struct ReasoningSplitter {
    state: SplitterState,
    scanner: MarkerScanner,
    space: String,
    /// Markers that may begin the output: the opening markers, and, if the prompt has already opened the
    /// reasoning, the closing markers, because the reasoning may be empty.
    start_markers: Vec<&'static str>,
    /// Markers that end the reasoning: the closing markers, and optionally the marker that opens a tool call,
    /// which some models generate without closing the reasoning first.
    end_markers: Vec<&'static str>,
    /// Number of forms of the opening marker; the closing marker has equally many. (Some models write a
    /// marker in several forms.)
    forms: usize,
}

/// Maximum number of whitespace bytes before the opening marker; an output with more has no opening marker.
const SPACE_MAX: usize = 64;

impl ReasoningSplitter {
    pub(crate) fn new(options: ReasoningParserOptions, call_marker: Option<&'static str>) -> Self {
        let markers = options.family.all_markers();
        let state = match options.start {
            ReasoningStart::Inside => SplitterState::Start { inside: true },
            ReasoningStart::AtMarker => SplitterState::Start { inside: false },
            ReasoningStart::After => SplitterState::After,
        };
        let (opens, closes) =
            (|| markers.iter().map(|one| one.open), || markers.iter().map(|one| one.close));
        let end_markers = closes().chain(call_marker).collect();
        let start_markers = opens().chain(closes()).collect();
        let (scanner, space) = (MarkerScanner::default(), String::new());
        Self { state, scanner, space, start_markers, end_markers, forms: markers.len() }
    }

    /// Whether the output parsed so far ends inside the reasoning.
    pub(crate) fn is_inside(&self) -> bool {
        matches!(self.state, SplitterState::Inside | SplitterState::Start { inside: true })
    }

    /// Whether the reasoning has ended: all further text is content.
    #[inline]
    pub(crate) fn is_after(&self) -> bool {
        self.state == SplitterState::After
    }

    /// Processes the next character and passes to `out` the characters whose section is final.
    pub(crate) fn push(&mut self, c: char, out: &mut dyn FnMut(OutputSection, char)) {
        match self.state {
            SplitterState::After => out(OutputSection::Content, c),
            SplitterState::Inside => self.inside(c, out),
            SplitterState::Start { inside } => {
                if self.scanner.is_empty() && c.is_whitespace() && self.space.len() < SPACE_MAX {
                    self.space.push(c);
                    return;
                }
                let mut text = String::new();
                let count = if inside { self.start_markers.len() } else { self.forms };
                match self.scanner.push(c, &self.start_markers[..count], |c| text.push(c)) {
                    Some(found) if found < self.forms => {
                        self.state = SplitterState::Inside;
                        self.space.clear();
                    }
                    Some(_) => {
                        self.state = SplitterState::After;
                        self.space.clear();
                    }
                    None if text.is_empty() => {}
                    None => self.resolve_start(inside, &text, out),
                }
            }
        }
    }

    /// Ends the output: passes the text held back to `out`.
    pub(crate) fn finish(&mut self, out: &mut dyn FnMut(OutputSection, char)) {
        let section =
            if self.is_inside() { OutputSection::Reasoning } else { OutputSection::Content };
        self.space.drain(..).for_each(|c| out(section, c));
        self.scanner.finish(|c| out(section, c));
    }

    /// Called when the output does not begin with a marker: the text held back is reasoning if `inside`,
    /// else content.
    fn resolve_start(
        &mut self,
        inside: bool,
        text: &str,
        out: &mut dyn FnMut(OutputSection, char),
    ) {
        let mut held_back = std::mem::take(&mut self.space) + text;
        self.scanner.finish(|c| held_back.push(c));
        self.state = if inside { SplitterState::Inside } else { SplitterState::After };
        held_back.chars().for_each(|c| self.push(c, out));
    }

    fn inside(&mut self, c: char, out: &mut dyn FnMut(OutputSection, char)) {
        let Some(end) =
            self.scanner.push(c, &self.end_markers, |c| out(OutputSection::Reasoning, c))
        else {
            return;
        };
        self.state = SplitterState::After;
        if end >= self.forms {
            self.end_markers[end].chars().for_each(|c| out(OutputSection::Content, c));
        }
    }
}
