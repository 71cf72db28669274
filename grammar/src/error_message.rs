//! Error messages for clients whose grammar is rejected by llguidance.
//!
//! llguidance's error texts contain positions and keywords, which help clients, but also panic messages,
//! source paths and backtraces. Only texts with a known format are sent, on one line and up to a maximum
//! length. Every other text is replaced by a fixed message and written to the log.

use super::compile::GrammarError;

/// Maximum number of characters in a message for a client.
const CLIENT_CHARS_MAX: usize = 240;
/// Maximum number of characters in a message for the log.
const LOG_CHARS_MAX: usize = 4_096;

/// Names of llguidance errors, and the messages shown to clients instead.
const RENAMED_LIBRARY_ERRORS: [(&str, &str); 4] = [
    ("NoExtensionBias", "the grammar accepts no text"),
    ("LexerTooComplex", "the grammar is too complex: the lexer exceeds its limits"),
    ("ParserTooComplex", "the grammar is too complex: the parser exceeds its limits"),
    ("InternalError", "the grammar cannot be enforced"),
];

/// Prefixes of llguidance texts that describe an error in the grammar. In Lark errors, a position precedes
/// the prefix.
const KNOWN_MESSAGE_PREFIXES: [&str; 63] = [
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
    "Unable to determine if regex is empty",
    "allOf must be ",
    "anyOf must be ",
    "can't determine if patternProperty ",
    "circular reference in token",
    "circular references with sibling keys ",
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
    "min/maxProperties only supported ",
    "no start rule",
    "oneOf constraints are not supported",
    "oneOf must be ",
    "only one field can be set on %regex",
    "override statement not supported",
    "params not supported",
    "patternProperty regexes ",
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

/// Substrings of llguidance texts that describe an internal error instead of an error in the grammar.
const INTERNAL_MESSAGE_MARKERS: [&str; 8] =
    ["panic", "backtrace", ".rs:", "src/", ".cargo", "rustc", "called `", "overflow"];

/// Converts an error of llguidance into an error that is safe to send to a client.
pub(super) fn client_message(error: &anyhow::Error) -> GrammarError {
    const NO_STATE: &str = "<non-verbose/>"; // Placeholder for the parser state at the end of texts.
    let full_text = error.to_string();
    let text = full_text.trim().trim_end_matches(NO_STATE).trim();
    if let Some((_, message)) = RENAMED_LIBRARY_ERRORS.iter().find(|(name, _)| text == *name) {
        return GrammarError::Invalid((*message).to_owned());
    }
    if text.is_empty() {
        return GrammarError::Invalid("the grammar is invalid".to_owned());
    }
    if is_about_grammar(text) {
        return GrammarError::Invalid(one_line(text));
    }
    GrammarError::Failed { detail: format!("{error:#}").chars().take(LOG_CHARS_MAX).collect() }
}

fn is_about_grammar(text: &str) -> bool {
    let lower = text.to_ascii_lowercase();
    let has_known_prefix =
        |text: &str| KNOWN_MESSAGE_PREFIXES.iter().any(|prefix| text.starts_with(prefix));
    !INTERNAL_MESSAGE_MARKERS.iter().any(|marker| lower.contains(marker))
        && (has_known_prefix(text) || after_position(text).is_some_and(has_known_prefix))
}

/// Returns the text after the position in `at 3(14): ...`, `3(14): ...` or `at EOF: ...`.
fn after_position(text: &str) -> Option<&str> {
    let (position, rest) = text.strip_prefix("at ").unwrap_or(text).split_once(": ")?;
    let is_position = |c: char| c.is_ascii_digit() || c == '(' || c == ')';
    (position == "EOF" || position.chars().all(is_position)).then_some(rest)
}

/// Joins the lines of a text. Removes control characters, which would corrupt a header or a log, and lines
/// that consist of `^` column markers.
fn one_line(text: &str) -> String {
    let is_pointer = |line: &&str| line.chars().all(|c| c == '^');
    let lines = text.lines().map(str::trim).filter(|line| !is_pointer(line));
    let line = lines.collect::<Vec<_>>().join(" ");
    line.chars().filter(|c| !c.is_control()).take(CLIENT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> GrammarError {
        client_message(&anyhow::Error::msg(text.to_owned()))
    }

    fn client_text(text: &str) -> String {
        converted(text).to_string()
    }

    #[test]
    fn error_messages_are_complete_sentences() {
        assert_eq!(
            client_text("regex parse error:\n    (\n    ^\nerror: unclosed group\n"),
            "regex parse error: ( error: unclosed group"
        );
        assert_eq!(client_text("NoExtensionBias\n<non-verbose/>"), "the grammar accepts no text");
        assert_eq!(client_text("\n"), "the grammar is invalid");
        let lark = "at 3(14): unknown name: \"b\"\n3 | a: b\n       ^";
        assert!(client_text(lark).starts_with("at 3(14): unknown name"), "{}", client_text(lark));
        assert_eq!(client_text(&format!("Expected {}", "x".repeat(9_000))).len(), CLIENT_CHARS_MAX);
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
            let GrammarError::Failed { detail } = converted(text) else { panic!("{text}") };
            assert_eq!(detail, text);
            assert_eq!(client_text(text), "the grammar cannot be compiled");
        }
        let GrammarError::Failed { detail } = converted(&"?".repeat(9_000)) else { panic!() };
        assert_eq!(detail.len(), LOG_CHARS_MAX);
    }
}
