//! Reasoning in a model's output: the text between two markers, such as `<think>` and `</think>`.
//!
//! If the prompt ends with the opening marker, the output starts inside the reasoning; if it ends with the
//! closing marker, the output has none. Otherwise the output of models that always reason starts inside the
//! reasoning, and the output of other models contains reasoning if it begins with the opening marker.

mod reader;
mod splitter;

use super::harmony;
pub use reader::TokenReasoningTracker;
pub(super) use reader::TrackedSections;
pub(super) use splitter::{OutputSection, ReasoningSplitter};

/// Reasoning format of a model family (`--reasoning-parser`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFamily {
    /// The output is reasoning if the prompt ends with `<think>`, or if the output begins with `<think>`.
    Qwen3,
    /// The output starts with reasoning unless the prompt ends with `</think>`.
    DeepSeekR1,
    /// The output is reasoning if it begins with `<think>`, or if the prompt ends with `<think>`. Templates
    /// end the prompt with `<think>` if `thinking` is true in `chat_template_kwargs`.
    DeepSeekV3,
    /// Same as `Qwen3`, with the markers `<seed:think>` and `</seed:think>`.
    SeedOss,
    /// Same as `Qwen3`, with the markers `[THINK]` and `[/THINK]`.
    Mistral,
    /// Same as `Qwen3`, with sentences as markers: `Here is my thought process:` and `Here is my response:`,
    /// or the same sentences with `Here's`.
    Granite,
    /// Same as `Qwen3`, with the markers `<|channel>thought` with a line break and `<channel|>`.
    Gemma4,
    /// The messages in the channel `analysis` (gpt-oss). Such messages may also follow content.
    Harmony,
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
    /// Command-line names of the reasoning formats, as in vLLM; `gpt-oss` is SGLang's name.
    pub const NAMES: &[(&str, Self)] = &[
        ("qwen3", Self::Qwen3),
        ("deepseek_r1", Self::DeepSeekR1),
        ("deepseek_v3", Self::DeepSeekV3),
        ("gemma4", Self::Gemma4),
        ("glm45", Self::Qwen3),
        ("glm47", Self::Qwen3),
        ("kimi_k2", Self::DeepSeekR1),
        ("minimax_m2", Self::DeepSeekR1),
        ("granite", Self::Granite),
        ("mistral", Self::Mistral),
        ("nemotron_v3", Self::DeepSeekR1),
        ("seed_oss", Self::SeedOss),
        ("step3", Self::DeepSeekR1),
        ("harmony", Self::Harmony),
        ("openai_gptoss", Self::Harmony),
        ("gpt-oss", Self::Harmony),
    ];

    /// Returns the markers around the reasoning.
    pub fn markers(self) -> ReasoningMarkers {
        self.all_markers()[0]
    }

    /// Returns all forms of the markers around the reasoning: some models write the markers in several forms.
    pub fn all_markers(self) -> &'static [ReasoningMarkers] {
        match self {
            Self::Qwen3 | Self::DeepSeekR1 | Self::DeepSeekV3 => {
                &[ReasoningMarkers { open: "<think>", close: "</think>" }]
            }
            Self::SeedOss => &[ReasoningMarkers { open: "<seed:think>", close: "</seed:think>" }],
            Self::Mistral => &[ReasoningMarkers { open: "[THINK]", close: "[/THINK]" }],
            Self::Granite => &[
                ReasoningMarkers {
                    open: "Here is my thought process:",
                    close: "Here is my response:",
                },
                ReasoningMarkers {
                    open: "Here's my thought process:",
                    close: "Here's my response:",
                },
            ],
            Self::Gemma4 => {
                &[ReasoningMarkers { open: "<|channel>thought\n", close: "<channel|>" }]
            }
            Self::Harmony => &[ReasoningMarkers {
                open: "<|channel|>analysis<|message|>",
                close: "<|end|><|start|>assistant",
            }],
        }
    }

    /// Returns the special tokens of which the markers consist.
    pub(super) fn special_tokens(self) -> Vec<&'static str> {
        let markers = self.all_markers().iter().flat_map(|markers| [markers.open, markers.close]);
        let parts: &[&str] = match self {
            Self::Gemma4 => &["<|channel>"],
            Self::Harmony => &harmony::MARKERS,
            _ => &[],
        };
        markers.chain(parts.iter().copied()).collect()
    }

    /// Returns the text that ends the reasoning and begins the answer, if reasoning may begin again after the
    /// closing marker; `None` if it cannot.
    pub fn answer_opening(self) -> Option<&'static str> {
        let is_harmony = self == Self::Harmony;
        is_harmony.then_some("<|end|><|start|>assistant<|channel|>final<|message|>")
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
        if self == Self::Harmony {
            // A template may also begin the answer. Otherwise the prompt ends with `<|start|>assistant`.
            let header = prompt_tail.rfind("<|start|>").map_or("", |at| &prompt_tail[at..]);
            let is_answer = header.contains("<|message|>") && !header.contains("<|end|>");
            return if is_answer { ReasoningStart::After } else { ReasoningStart::AtMarker };
        }
        if self.last_close(prompt_tail) == Some(prompt_tail.len()) {
            return ReasoningStart::After;
        }
        match self {
            Self::DeepSeekR1 => ReasoningStart::Inside,
            _ => ReasoningStart::AtMarker,
        }
    }

    /// Returns the text after the last opening marker in `message`, an assistant message whose reasoning the
    /// model is to continue.
    pub fn trailing_reasoning(self, message: &str) -> &str {
        self.last_open(message).map_or("", |end| &message[end..])
    }

    /// Returns the reasoning state at the start of an output that continues the assistant message `message`.
    pub fn start_after_message(self, message: &str) -> ReasoningStart {
        if self == Self::Harmony {
            return ReasoningStart::After;
        }
        match (self.last_open(message), self.last_close(message)) {
            (Some(open), close) if close.is_none_or(|close| close < open) => ReasoningStart::Inside,
            (None, None) if message.trim().is_empty() => self.start_after_prompt(""),
            _ => ReasoningStart::After,
        }
    }
}
