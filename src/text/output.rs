//! A model's output as a client wants it: reasoning, content and tool calls told apart while it comes.
//!
//! The same at any cut of the output; linear; what is held back is bounded.

use super::detokenizer::Detokenizer;
use super::pieces::{PieceList, Pieces};
use super::reasoning::{Beginning, Part, Reasoning, ReasoningReader, Splitter};
use super::tokenizer::Tokenizer;
use super::tool_calls::{CallSyntax, Calls, Tool};
use protocol::Token;
use std::sync::Arc;

/// How a model's outputs are read.
#[derive(Debug, Clone, Default)]
pub struct Parsers {
    /// Syntax of calls; `None` = not read.
    pub calls: Option<CallSyntax>,
    /// Habit of reasoning; `None` = not read.
    pub reasoning: Option<Reasoning>,
    /// The model opens its reasoning itself, unless the prompt closes it.
    pub opens_reasoning: bool,
    marks_of_reasoning: Arc<[Token]>,
    marks_of_both: Arc<[Token]>,
}

impl Parsers {
    /// Parsers over the tokenizer of their model.
    pub fn new(
        calls: Option<CallSyntax>,
        reasoning: Option<Reasoning>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let of_reasoning = reasoning.map_or(&[][..], |_| Reasoning::MARKS);
        let of_calls = calls.map_or(&[][..], CallSyntax::marks);
        let id = |mark: &&str| tokenizer.token_id(mark);
        Self {
            calls,
            reasoning,
            opens_reasoning: false,
            marks_of_reasoning: of_reasoning.iter().filter_map(id).collect(),
            marks_of_both: of_reasoning.iter().chain(of_calls).filter_map(id).collect(),
        }
    }

    /// Special tokens whose text must reach a parser, with or without calls.
    pub fn kept(&self, calls: bool) -> Arc<[Token]> {
        Arc::clone(if calls { &self.marks_of_both } else { &self.marks_of_reasoning })
    }
}

/// Reads one output.
#[derive(Debug, Clone)]
pub struct OutputParser {
    splitter: Option<Splitter>,
    calls: Option<Calls>,
    /// Bytes read.
    at: usize,
}

impl OutputParser {
    /// A parser before the first character.
    ///
    /// `calls`: syntax, tools and most calls to show. `None` for both parts leaves all as content.
    pub fn new(
        reasoning: Option<Beginning>,
        calls: Option<(CallSyntax, &Arc<[Tool]>, u32)>,
    ) -> Self {
        let opening = calls.and_then(|(syntax, ..)| syntax.opening());
        Self {
            splitter: reasoning.map(|beginning| Splitter::new(beginning, opening)),
            calls: calls.map(|(syntax, tools, most)| Calls::new(syntax, tools, most)),
            at: 0,
        }
    }

    /// Takes the next part of the output and appends what is certain.
    pub fn push(&mut self, text: &str, pieces: &mut PieceList) {
        if self.splitter.is_none() && self.calls.is_none() {
            return Pieces::new(pieces, self.at).text(text);
        }
        for c in text.chars() {
            self.at += c.len_utf8();
            let mut out = Pieces::new(pieces, self.at);
            match &mut self.splitter {
                Some(splitter) if !splitter.is_behind() => {
                    splitter.push(c, &mut |part, c| part_of(&mut self.calls, part, c, &mut out));
                }
                _ => content(&mut self.calls, c, &mut out),
            }
        }
    }

    /// The output has ended: appends what was held back.
    pub fn finish(&mut self, pieces: &mut PieceList) {
        let mut out = Pieces::new(pieces, self.at);
        if let Some(splitter) = &mut self.splitter {
            splitter.finish(&mut |part, c| part_of(&mut self.calls, part, c, &mut out));
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut out);
        }
    }

    /// Whether the model is thinking.
    pub fn is_reasoning(&self) -> bool {
        self.splitter.as_ref().is_some_and(Splitter::is_inside)
    }

    /// Whether reasoning is told apart.
    pub fn reads_reasoning(&self) -> bool {
        self.splitter.is_some()
    }

    /// What reads the same reasoning from tokens; `None` = there is none to come.
    pub fn reasoning_reader(&self, detokenizer: Detokenizer) -> Option<ReasoningReader> {
        let splitter = self.splitter.as_ref().filter(|splitter| !splitter.is_behind())?;
        Some(ReasoningReader::new(detokenizer, splitter.clone()))
    }

    /// Calls that are complete.
    pub fn calls_complete(&self) -> u32 {
        self.calls.as_ref().map_or(0, Calls::complete)
    }
}

fn part_of(calls: &mut Option<Calls>, part: Part, c: char, out: &mut Pieces<'_>) {
    match part {
        Part::Reasoning => out.reasoning(c),
        Part::Content => content(calls, c, out),
    }
}

fn content(calls: &mut Option<Calls>, c: char, out: &mut Pieces<'_>) {
    match calls {
        Some(calls) => calls.push(c, out),
        None => out.content(c),
    }
}
