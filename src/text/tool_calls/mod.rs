//! Tool calls in a model's output: one hand-written machine per family, driven character by character.
//!
//! A machine sees each character once and keeps a bounded amount of text, so its work is linear and
//! independent of how the output is cut. Names follow vLLM. A malformed call stays content.

mod call_object;
mod coercion;
mod cut_arguments;
mod deepseek;
mod emitter;
mod grammar;
mod hermes;
mod json_scan;
mod llama3_json;
mod marks;
mod mistral;
mod qwen3_coder;
mod raw;
mod tool;

use super::pieces::Pieces;
use super::tokenizer::Tokenizer;
pub use cut_arguments::cut_arguments;
use deepseek::DeepSeek;
use emitter::Emitter;
use hermes::Hermes;
use llama3_json::Llama;
pub(super) use marks::Held;
use mistral::Mistral;
use qwen3_coder::Coder;
use std::sync::Arc;
pub use tool::Tool;

/// A family's syntax of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallSyntax {
    /// `<tool_call>` around JSON: Hermes, Qwen2.5, Qwen3.
    Hermes,
    /// `<function=…>` and `<parameter=…>`: Qwen3-Coder.
    Qwen3Coder,
    /// Bare JSON: Llama 3.
    Llama3Json,
    /// `[TOOL_CALLS]`.
    Mistral,
    /// Fenced JSON between marks: DeepSeek V3, R1.
    DeepSeekV3,
    /// JSON between marks: DeepSeek V3.1.
    DeepSeekV31,
}

/// How ids of calls look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallIds {
    /// `call_` and 24 alphanumerics.
    Long,
    /// 9 alphanumerics, which Mistral's templates insist on.
    Nine,
}

impl CallSyntax {
    /// Names that the command line takes.
    pub const NAMES: &[(&str, Self)] = &[
        ("hermes", Self::Hermes),
        ("qwen3_coder", Self::Qwen3Coder),
        ("qwen3_xml", Self::Qwen3Coder),
        ("llama3_json", Self::Llama3Json),
        ("mistral", Self::Mistral),
        ("deepseek_v3", Self::DeepSeekV3),
        ("deepseek_v31", Self::DeepSeekV31),
    ];

    /// How its ids look.
    pub fn ids(self) -> CallIds {
        if self == Self::Mistral { CallIds::Nine } else { CallIds::Long }
    }

    /// Marks that a tokenizer may hold as special tokens; their text must reach the parser.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &[hermes::OPEN, hermes::CLOSE],
            Self::Llama3Json => &[llama3_json::TAG],
            Self::Mistral => &[mistral::CALLS, mistral::CALL_ID, mistral::ARGS],
            Self::DeepSeekV3 | Self::DeepSeekV31 => &[
                deepseek::CALLS_BEGIN,
                deepseek::CALLS_END,
                deepseek::CALL_BEGIN,
                deepseek::CALL_END,
                deepseek::SEPARATOR,
            ],
        }
    }

    /// The grammar, in llguidance's dialect of Lark, of one call or of several of any of `tools`.
    pub fn grammar<'a>(
        self,
        tools: impl IntoIterator<Item = &'a Tool>,
        several: bool,
        tokenizer: &Tokenizer,
    ) -> String {
        grammar::of(self, tools, several, |mark| match tokenizer.token_id(mark) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => grammar::text(mark),
        })
    }

    /// The mark that opens a call, where calls cannot begin without one.
    pub(super) fn opening(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::Qwen3Coder => Some(hermes::OPEN),
            Self::Llama3Json => None,
            Self::Mistral => Some(mistral::CALLS),
            Self::DeepSeekV3 | Self::DeepSeekV31 => Some(deepseek::CALLS_BEGIN),
        }
    }
}

#[derive(Debug, Clone)]
enum Machine {
    Hermes(Hermes),
    Coder(Coder),
    Llama(Llama),
    Mistral(Mistral),
    DeepSeek(DeepSeek),
}

/// Finds the calls of one output.
#[derive(Debug, Clone)]
pub(super) struct Calls {
    machine: Machine,
    emitter: Emitter,
}

impl Calls {
    /// A parser before the first character. Calls beyond `calls_max` are dropped.
    pub(super) fn new(syntax: CallSyntax, tools: &Arc<[Tool]>, calls_max: u32) -> Self {
        let machine = match syntax {
            CallSyntax::Hermes => Machine::Hermes(Hermes::default()),
            CallSyntax::Qwen3Coder => Machine::Coder(Coder::new(Arc::clone(tools))),
            CallSyntax::Llama3Json => {
                let names = tools.iter().map(|tool| tool.name.clone());
                Machine::Llama(Llama::new(Some(names.collect())))
            }
            CallSyntax::Mistral => Machine::Mistral(Mistral::default()),
            CallSyntax::DeepSeekV3 => Machine::DeepSeek(DeepSeek::new(true)),
            CallSyntax::DeepSeekV31 => Machine::DeepSeek(DeepSeek::new(false)),
        };
        Self { machine, emitter: Emitter::new(calls_max) }
    }

    /// Calls shown and complete.
    pub(super) fn complete(&self) -> u32 {
        self.emitter.complete()
    }

    /// Takes the next character of content.
    #[inline]
    pub(super) fn push(&mut self, c: char, out: &mut Pieces<'_>) {
        let to = &mut self.emitter;
        match &mut self.machine {
            Machine::Hermes(machine) => machine.push(c, to, out),
            Machine::Coder(machine) => machine.push(c, to, out),
            Machine::Llama(machine) => machine.push(c, to, out),
            Machine::Mistral(machine) => machine.push(c, to, out),
            Machine::DeepSeek(machine) => machine.push(c, to, out),
        }
    }

    /// The output has ended.
    pub(super) fn finish(&mut self, out: &mut Pieces<'_>) {
        let to = &mut self.emitter;
        match &mut self.machine {
            Machine::Hermes(machine) => machine.finish(to, out),
            Machine::Coder(machine) => machine.finish(to, out),
            Machine::Llama(machine) => machine.finish(to, out),
            Machine::Mistral(machine) => machine.finish(to, out),
            Machine::DeepSeek(machine) => machine.finish(to, out),
        }
        to.finish(out);
    }
}
