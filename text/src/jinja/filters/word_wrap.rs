//! The filter `wordwrap`, which wraps lines as Python's `textwrap` does.

use super::super::arguments::{CallArguments, flag, given, integer_or, text_argument};
use super::super::error::{JinjaError, JinjaResult};
use super::super::evaluator::TemplateEvaluator;
use super::super::methods::text_classes::is_alphanumeric;
use super::super::methods::text_split::split_lines;
use super::super::python_text::is_space;
use super::super::value::JinjaValue;
use std::ops::Range;

/// Implements the filter `wordwrap`.
///
/// Errors: the value is not a string, the width is not positive, or a limit is exceeded.
pub(super) fn word_wrap(
    evaluator: &mut TemplateEvaluator,
    value: &JinjaValue,
    arguments: CallArguments,
) -> JinjaResult<JinjaValue> {
    let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, break_long, separator, break_hyphens] = arguments.bind("wordwrap", names, 0)?;
    let width = integer_or(width.as_ref(), 79)?;
    let separator = match given(separator) {
        Some(separator) => text_argument("wordwrap", &separator)?,
        None => "\n".into(),
    };
    let text = text_argument("wordwrap", value)?;
    evaluator.spend_bytes(text.len().saturating_mul(8))?;
    evaluator.charge(text.len().saturating_mul(16))?;
    let mut out = String::new();
    for (index, line) in split_lines(&text, false).into_iter().enumerate() {
        let Some(width) = usize::try_from(width).ok().filter(|width| *width > 0) else {
            let message = format!("invalid width {width} (must be > 0)");
            return Err(JinjaError::value_error(message));
        };
        let wrapper = LineWrapper {
            characters: line.chars().collect(),
            width,
            break_long: flag(break_long.as_ref(), true),
            break_hyphens: flag(break_hyphens.as_ref(), true),
        };
        if index > 0 {
            out.push_str(&separator);
        }
        for (index, line) in wrapper.lines().into_iter().enumerate() {
            evaluator.charge(separator.len())?;
            if index > 0 {
                out.push_str(&separator);
            }
            out.push_str(&line);
        }
    }
    Ok(JinjaValue::text(out))
}

/// Wraps one line for the filter `wordwrap`, like an instance of `textwrap.TextWrapper` in Python.
struct LineWrapper {
    characters: Vec<char>,
    width: usize,
    break_long: bool,
    break_hyphens: bool,
}

/// White space at which `textwrap` breaks lines.
fn is_break_space(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\u{b}' | '\u{c}' | '\r' | ' ')
}

fn is_word(c: char) -> bool {
    c == '_' || is_alphanumeric(c)
}

fn is_letter(c: char) -> bool {
    is_word(c) && !c.is_numeric()
}

fn is_word_punctuation(c: char) -> bool {
    is_word(c) || matches!(c, '!' | '"' | '\'' | '&' | '.' | ',' | '?')
}

impl LineWrapper {
    fn is_at(&self, index: usize, test: impl Fn(char) -> bool) -> bool {
        self.characters.get(index).is_some_and(|c| test(*c))
    }

    fn is_before(&self, index: usize, back: usize, test: impl Fn(char) -> bool) -> bool {
        index.checked_sub(back).is_some_and(|index| self.is_at(index, test))
    }

    /// Returns the end of the run of two or more hyphens that begins at `index`; `None` if there is no such
    /// run or no word follows it.
    fn dash_end(&self, index: usize) -> Option<usize> {
        let count = self.characters[index..].iter().take_while(|c| **c == '-').count();
        (count >= 2 && self.is_at(index + count, is_word)).then_some(index + count)
    }

    /// Whether the character at `index` is a hyphen after which a line may break. On each side of it must be
    /// two letters, which may be separated by another hyphen.
    fn is_breakable_hyphen(&self, index: usize) -> bool {
        let after_letters = self.is_before(index, 1, is_letter)
            && (self.is_before(index, 2, is_letter)
                || self.is_before(index, 2, |c| c == '-') && self.is_before(index, 3, is_letter));
        let before_letters = self.is_at(index + 1, is_letter)
            && (self.is_at(index + 2, is_letter)
                || self.is_at(index + 2, |c| c == '-') && self.is_at(index + 3, is_letter));
        self.is_at(index, |c| c == '-') && after_letters && before_letters
    }

    /// Returns the end of the word that begins at `start`.
    fn word_end(&self, start: usize) -> usize {
        if !self.break_hyphens {
            let length =
                self.characters[start..].iter().take_while(|c| !is_break_space(**c)).count();
            return start + length;
        }
        if self.is_before(start, 1, is_word_punctuation)
            && let Some(end) = self.dash_end(start)
        {
            return end;
        }
        let mut at = start + 1;
        loop {
            if self.is_breakable_hyphen(at) {
                return at + 1;
            }
            if at >= self.characters.len() || self.is_at(at, is_break_space) {
                return at;
            }
            if self.is_before(at, 1, is_word_punctuation) && self.dash_end(at).is_some() {
                return at;
            }
            at += 1;
        }
    }

    /// Returns the words and the runs of white space in reverse order.
    fn chunks(&self) -> Vec<Range<usize>> {
        let mut chunks = Vec::new();
        let mut start = 0;
        while start < self.characters.len() {
            let spaces =
                self.characters[start..].iter().take_while(|c| is_break_space(**c)).count();
            let end = if spaces > 0 { start + spaces } else { self.word_end(start) };
            chunks.push(start..end);
            start = end;
        }
        chunks.reverse();
        chunks
    }

    fn is_blank(&self, chunk: &Range<usize>) -> bool {
        self.characters[chunk.clone()].iter().all(|c| is_space(*c))
    }

    fn lines(&self) -> Vec<String> {
        let mut chunks = self.chunks();
        let mut lines: Vec<String> = Vec::new();
        while let Some(next) = chunks.last() {
            if self.is_blank(next) && !lines.is_empty() {
                chunks.pop();
            }
            let mut line: Vec<Range<usize>> = Vec::new();
            let mut length = 0;
            while let Some(chunk) = chunks.pop_if(|chunk| length + chunk.len() <= self.width) {
                length += chunk.len();
                line.push(chunk);
            }
            if chunks.last().is_some_and(|chunk| chunk.len() > self.width) {
                self.break_word(&mut chunks, &mut line, self.width - length);
            }
            line.pop_if(|chunk| self.is_blank(chunk));
            if !line.is_empty() {
                lines.push(line.into_iter().flat_map(|chunk| &self.characters[chunk]).collect());
            }
        }
        lines
    }

    /// Moves the first `space` characters of a long word to the line, or fewer if the word is split at a
    /// hyphen.
    fn break_word(
        &self,
        chunks: &mut Vec<Range<usize>>,
        line: &mut Vec<Range<usize>>,
        space: usize,
    ) {
        let Some(chunk) = chunks.last_mut() else { return };
        if self.break_long {
            let mut end = chunk.start + space;
            if self.break_hyphens && chunk.len() > space {
                let part = &self.characters[chunk.start..end];
                let hyphen = part.iter().rposition(|c| *c == '-').unwrap_or(0);
                if hyphen > 0 && part[..hyphen].iter().any(|c| *c != '-') {
                    end = chunk.start + hyphen + 1;
                }
            }
            line.push(chunk.start..end);
            chunk.start = end;
        } else if line.is_empty() {
            line.extend(chunks.pop());
        }
    }
}
