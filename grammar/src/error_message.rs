//! What a client is told about a grammar that the compiler library refuses.
//!
//! The library's texts name positions and keywords, which help, but also hold panic messages, source paths and
//! backtraces. Only texts of known shapes are shown, on one line, up to a length; everything else becomes a fixed text,
//! and the log gets the rest.

use super::compile::GrammarError;

/// Characters of an explanation that a client gets to see.
const SHOWN_CHARS: usize = 240;
/// Characters of a text that only the log gets.
const LOGGED_CHARS: usize = 4_096;

/// Names of the library's own, in our words.
const RENAMED_LIBRARY_ERRORS: [(&str, &str); 4] = [
    ("NoExtensionBias", "the grammar accepts no text"),
    ("LexerTooComplex", "the grammar is too complex: its words take too much to tell apart"),
    ("ParserTooComplex", "the grammar is too complex: too many ways to read a text"),
    ("InternalError", "the grammar cannot be followed"),
];

/// How texts begin that say what is wrong with a grammar; those of Lark may stand after a position.
const KNOWN_MESSAGE_PREFIXES: [&str; 58] = [
    "All options in ",
    "Definition not found",
    "Empty grammar",
    "Expected ",
    "Failed to generate regex",
    "Infinite numbers not supported",
    "Invalid ",
    "No options in ",
    "Only ",
    "Reference segment ",
    "Schema intersection stack level exceeded",
    "Unexpected ",
    "Unimplemented ",
    "Unknown ",
    "Unmatched ",
    "Unsatisfiable schema",
    "Value for 'multipleOf' ",
    "allOf must be ",
    "anyOf must be ",
    "circular reference in token",
    "declare statement not supported",
    "empty ",
    "enum must be ",
    "error parsing ",
    "expected ",
    "expecting ",
    "failed to compile JSON schema",
    "failed to parse ",
    "flags not allowed",
    "grammar ",
    "initial lexer configuration",
    "invalid ",
    "l-flag is not supported",
    "lexer error",
    "lexer precomputation failed",
    "maxLength ",
    "minLength ",
    "negated wildcard token",
    "nested %lark",
    "no fields set on %regex",
    "no start rule",
    "oneOf constraints are not supported",
    "oneOf must be ",
    "only one field can be set on %regex",
    "override statement not supported",
    "params not supported",
    "prefixItems must be ",
    "properties must be ",
    "range ",
    "ranges not supported",
    "regex parse error",
    "rule ",
    "schema must be ",
    "schema too large",
    "special tokens ",
    "too many ",
    "type must be ",
    "unknown ",
];

/// Signs of a text that is about the library and not about the grammar.
const INTERNAL_MESSAGE_MARKERS: [&str; 8] =
    ["panic", "backtrace", ".rs:", "src/", ".cargo", "rustc", "called `", "overflow"];

/// What a client may know of an error of the library.
pub(super) fn client_message(error: &anyhow::Error) -> GrammarError {
    const NO_STATE: &str = "<non-verbose/>"; // Ends texts in place of the compiler's state.
    let whole = error.to_string();
    let text = whole.trim().trim_end_matches(NO_STATE).trim();
    if let Some((_, words)) = RENAMED_LIBRARY_ERRORS.iter().find(|(name, _)| text == *name) {
        return GrammarError::Invalid((*words).to_owned());
    }
    if text.is_empty() {
        return GrammarError::Invalid("the grammar is invalid".to_owned());
    }
    if is_about_grammar(text) {
        return GrammarError::Invalid(one_line(text));
    }
    GrammarError::Failed { detail: format!("{error:#}").chars().take(LOGGED_CHARS).collect() }
}

fn is_about_grammar(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    let begins =
        |text: &str| KNOWN_MESSAGE_PREFIXES.iter().any(|beginning| text.starts_with(beginning));
    !INTERNAL_MESSAGE_MARKERS.iter().any(|sign| lower.contains(sign))
        && (begins(text) || after_position(text).is_some_and(begins))
}

/// The rest of `at 3(14): ...`, `3(14): ...` or `at EOF: ...`.
fn after_position(text: &str) -> Option<&str> {
    let (position, rest) = text.strip_prefix("at ").unwrap_or(text).split_once(": ")?;
    let is_position = |c: char| c.is_ascii_digit() || c == '(' || c == ')';
    (position == "EOF" || position.chars().all(is_position)).then_some(rest)
}

/// Without what would break a header or a log, and without the line that points at a column.
fn one_line(text: &str) -> String {
    let is_pointer = |line: &&str| line.chars().all(|c| c == '^');
    let lines = text.lines().map(str::trim).filter(|line| !is_pointer(line));
    let line = lines.collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(text: &str) -> GrammarError {
        client_message(&anyhow::Error::msg(text.to_owned()))
    }

    fn shown(text: &str) -> String {
        explained(text).to_string()
    }

    #[test]
    fn error_messages_are_complete_sentences() {
        assert_eq!(
            shown("regex parse error:\n    (\n    ^\nerror: unclosed group\n"),
            "regex parse error: ( error: unclosed group"
        );
        assert_eq!(shown("NoExtensionBias\n<non-verbose/>"), "the grammar accepts no text");
        assert_eq!(shown("\n"), "the grammar is invalid");
        let lark = "at 3(14): unknown name: \"b\"\n3 | a: b\n       ^";
        assert!(shown(lark).starts_with("at 3(14): unknown name"), "{}", shown(lark));
        assert_eq!(shown(&format!("Expected {}", "x".repeat(9_000))).len(), SHOWN_CHARS);
    }

    #[test]
    fn internal_messages_are_logged_but_not_sent() {
        for text in [
            "panic: attempt to multiply with overflow\n<backtrace>\n0: rust_begin_unwind",
            "invalid index at /root/.cargo/registry/src/x-1.0/lib.rs:3",
            "Internal error: no such row",
            "at /home/user/engine: rule x",
            "thread 'main' panicked",
        ] {
            let GrammarError::Failed { detail } = explained(text) else { panic!("{text}") };
            assert_eq!(detail, text);
            assert_eq!(shown(text), "the grammar cannot be compiled");
        }
        let GrammarError::Failed { detail } = explained(&"?".repeat(9_000)) else { panic!() };
        assert_eq!(detail.len(), LOGGED_CHARS);
    }
}
