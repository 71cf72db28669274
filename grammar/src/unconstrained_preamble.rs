//! Unconstrained text at the beginning of an output, such as reasoning, up to a marker after which the
//! constraint starts.

use super::lark_text::{up_to, without};
use protocol::Token;
use serde::{Deserialize, Serialize};

/// Unconstrained text at the beginning of an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnconstrainedPreamble {
    /// Any text up to a marker.
    UpToMarker {
        /// Special token that may begin the unconstrained text.
        opening: Option<Token>,
        /// Markers, each of which ends the unconstrained text.
        ends: Vec<PreambleEndMarker>,
    },
    /// Text that matches the rule `head` of these rules, in llguidance's dialect of Lark.
    Lark(String),
}

/// Marker that ends unconstrained text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreambleEndMarker {
    /// Text of the marker.
    pub text: String,
    /// Token id of the marker. Other token sequences with the same text are then not allowed, because the
    /// output parser would read them as the marker. `None` = the marker is plain text.
    pub token: Option<Token>,
}

impl From<&str> for UnconstrainedPreamble {
    /// Creates unconstrained text that ends with a plain-text marker.
    fn from(marker: &str) -> Self {
        Self::UpToMarker {
            opening: None,
            ends: vec![PreambleEndMarker { text: marker.to_owned(), token: None }],
        }
    }
}

impl UnconstrainedPreamble {
    /// Returns the Lark grammar for the unconstrained text followed by the grammar named `rest`.
    pub(super) fn grammar_before(&self, rest: &str) -> String {
        match self {
            Self::UpToMarker { opening, ends } => marker_grammar(*opening, ends, rest),
            Self::Lark(rules) => format!("start: head @{rest}\n{rules}"),
        }
    }
}

/// Returns the Lark grammar for any text up to one of `ends`, followed by the grammar named `rest`.
fn marker_grammar(opening: Option<Token>, ends: &[PreambleEndMarker], rest: &str) -> String {
    let texts = |is_token: bool| -> Vec<String> {
        let ends = ends.iter().filter(|end| end.token.is_some() == is_token);
        ends.map(|end| end.text.clone()).collect()
    };
    let (token_texts, plain_texts) = (texts(true), texts(false));
    let mut alternatives = Vec::new();
    let mut terminals = Vec::new();
    if !token_texts.is_empty() {
        let all: Vec<String> = ends.iter().map(|end| end.text.clone()).collect();
        terminals.push(format!("FREE: {}\n", without(&all)));
        let tokens = ends.iter().filter_map(|end| end.token);
        let tokens: Vec<String> = tokens.map(|id| format!("<[{id}]>")).collect();
        alternatives.push(format!("FREE ({})", tokens.join(" | ")));
    }
    if !plain_texts.is_empty() {
        terminals.push(format!("ENDED: {}\n", up_to(&plain_texts, &token_texts)));
        alternatives.push("ENDED".to_owned());
    }
    let opening = opening.map(|id| format!("(<[{id}]>)? ")).unwrap_or_default();
    let (head, terminals) = (alternatives.join(" | "), terminals.concat());
    format!("start: {opening}head @{rest}\nhead: {head}\n{terminals}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{compile_with, vocabulary};
    use crate::{
        CompiledGrammar, GrammarCompiler, GrammarSpec, GrammarVocabulary, OutputConstraint,
    };

    /// Ids of the tokens for the reasoning markers: `<t>`, which is a special token, and `</t>`.
    const OPEN_MARKER: Token = 257;
    const CLOSE_MARKER: Token = 258;

    fn marker_vocabulary(is_close_special: bool) -> GrammarVocabulary {
        let mut vocabulary = vocabulary();
        vocabulary.tokens.extend([b"<t>".to_vec(), b"</t>".to_vec()]);
        vocabulary.special.push(OPEN_MARKER);
        vocabulary.special.extend(is_close_special.then_some(CLOSE_MARKER));
        vocabulary
    }

    /// Whether each token is allowed after its predecessors, and the text may end after the last token.
    fn accepts_tokens(compiled: &CompiledGrammar, tokens: &[Token]) -> bool {
        let mut session = compiled.session_seed(false).session();
        for &id in tokens {
            if session.mask().is_none_or(|mask| mask[id as usize / 32] >> (id % 32) & 1 == 0) {
                return false;
            }
            session.advance(&[id]);
        }
        session.may_end()
    }

    #[test]
    fn constraint_may_start_after_a_token() {
        let text = |text: &str| text.bytes().map(Token::from).collect::<Vec<_>>();
        let close = PreambleEndMarker { text: "</t>".to_owned(), token: Some(CLOSE_MARKER) };
        let plain = PreambleEndMarker { text: "So:".to_owned(), token: None };
        for is_close_special in [true, false] {
            let compiler = GrammarCompiler::new(marker_vocabulary(is_close_special)).unwrap();
            let compiled = |ends: &[&PreambleEndMarker]| {
                let ends = ends.iter().map(|&end| end.clone()).collect();
                let head = UnconstrainedPreamble::UpToMarker { opening: Some(OPEN_MARKER), ends };
                let spec = GrammarSpec::Regex("yes".to_owned());
                let constraint = OutputConstraint::new(spec, "test").start_after(head);
                compile_with(&compiler, &constraint).unwrap()
            };
            let (one, both) = (compiled(&[&close]), compiled(&[&close, &plain]));
            for accepting in [&one, &both] {
                for (head, rest, is_accepted) in [
                    (&[OPEN_MARKER][..], "yes", true),
                    (&[], "yes", true),
                    (&[Token::from(b'a'), Token::from(b'<')], "yes", true),
                    (&[Token::from(b'a'), OPEN_MARKER], "yes", false),
                    (&[OPEN_MARKER, OPEN_MARKER], "yes", false),
                    (&[], "no", false),
                ] {
                    let output = [head, &[CLOSE_MARKER], &text(rest)].concat();
                    assert_eq!(accepts_tokens(accepting, &output), is_accepted, "{output:?}");
                }
                assert!(!accepts_tokens(accepting, &text("a</t>yes")), "the marker is a token");
            }
            assert!(!accepts_tokens(&one, &text("So:yes")));
            assert!(accepts_tokens(&both, &text("S. So:yes")));
            assert!(!accepts_tokens(&both, &text("So:So:yes")));
        }
    }
}
