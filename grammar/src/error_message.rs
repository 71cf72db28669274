//! Error messages for clients whose grammar is rejected by the grammar library (llguidance).
//!
//! Texts of the library also contain panic messages, source paths and backtraces, and change with its version.
//! Clients therefore get messages of [`library_errors`]: a fixed sentence, with the position and the name in
//! the client's grammar that the library reports. Texts without an entry are written to the log only.

mod library_errors;

use super::compile::GrammarError;
#[cfg(test)]
pub(super) use library_errors::library_texts;
use library_errors::{find, find_regex};

/// Maximum number of characters of a name from the grammar in a message.
const NAME_CHARS_MAX: usize = 64;
/// Maximum number of characters in a message for the log.
const LOG_CHARS_MAX: usize = 4_096;
/// Maximum number of causes in a message.
const CAUSES_MAX: usize = 2;

/// Converts an error of the library into an error that is safe to send to a client. `shows_position`: the
/// library has read the text of the client, so that positions in the error are positions in this text.
pub(super) fn client_message(error: &anyhow::Error, shows_position: bool) -> GrammarError {
    const NO_STATE: &str = "<non-verbose/>"; // Placeholder for the parser state at the end of texts.
    let full_text = error.to_string();
    let text = full_text.trim().trim_end_matches(NO_STATE).trim();
    if text.is_empty() {
        return GrammarError::Invalid("the grammar is invalid".to_owned());
    }
    let located = LocatedText::split(text);
    let Some(message) = message_for(located.text, CAUSES_MAX) else {
        let detail = format!("{error:#}").chars().take(LOG_CHARS_MAX).collect();
        return GrammarError::Failed { detail };
    };
    GrammarError::Invalid(match located.place.filter(|_| shows_position) {
        Some(place) => format!("{place}: {message}"),
        None => message,
    })
}

/// Returns our message for a text of the library, with up to `causes_max` causes.
fn message_for(text: &str, causes_max: usize) -> Option<String> {
    const FRAME: &str = "regex parse error:";
    if let Some(at) = text.find(FRAME) {
        return Some(regex_message(&text[at + FRAME.len()..]));
    }
    let entry = find(text)?;
    let rest = &text[entry.parts[0].len()..];
    let message = match name_in(rest) {
        Some(name) => entry.message.replace("{}", &name),
        None => entry.message.replace("{}", "it"),
    };
    let cause = (entry.has_cause && causes_max > 0)
        .then(|| message_for(LocatedText::split(rest.trim()).text, causes_max - 1));
    Some(match cause.flatten() {
        Some(cause) => format!("{message}: {cause}"),
        None => message,
    })
}

/// Returns our message for an error of the regular-expression parser, whose last line names the error.
fn regex_message(framed: &str) -> String {
    let kind = framed.rsplit("error: ").next().unwrap_or_default().trim();
    match find_regex(kind) {
        Some(entry) => format!("a regular expression is invalid: {}", entry.message),
        None => "a regular expression is invalid".to_owned(),
    }
}

/// A text of the library without its position, and the position in words.
struct LocatedText<'a> {
    text: &'a str,
    place: Option<String>,
}

impl<'a> LocatedText<'a> {
    /// Splits a text such as `at 3(14): ...`, `3(14): ...` or `at EOF: ...`.
    fn split(text: &'a str) -> Self {
        let located = text.strip_prefix("at ").unwrap_or(text).split_once(": ");
        let Some((position, rest)) = located else { return Self { text, place: None } };
        if position == "EOF" {
            return Self { text: rest, place: Some("end of the grammar".to_owned()) };
        }
        let numbers = position.strip_suffix(')').and_then(|position| position.split_once('('));
        match numbers.map(|(line, column)| (line.parse::<u32>(), column.parse::<u32>())) {
            Some((Ok(line), Ok(column))) => {
                Self { text: rest, place: Some(format!("line {line}, column {column}")) }
            }
            _ => Self { text, place: None },
        }
    }
}

/// Returns the first name in a text of the library: in quotes, or at its start. Only characters of names are
/// accepted, so that the result is no other text of the library.
fn name_in(text: &str) -> Option<String> {
    let text = text.lines().next().unwrap_or_default();
    let is_name = |c: char| c.is_alphanumeric() || "_-.$#/@%&".contains(c);
    let quoted = text.split_once(['"', '\'']).map(|(_, rest)| rest);
    let quoted = quoted.and_then(|rest| rest.split(['"', '\'']).next());
    let first = text.split([' ', ';', ',']).next();
    let name = quoted.or(first)?;
    let is_short = (1..=NAME_CHARS_MAX).contains(&name.chars().count());
    (is_short && name.chars().all(is_name)).then(|| format!("`{name}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> GrammarError {
        client_message(&anyhow::Error::msg(text.to_owned()), true)
    }

    fn client_text(text: &str) -> String {
        converted(text).to_string()
    }

    #[test]
    fn error_messages_are_our_own_sentences() {
        for (text, expected) in [
            (
                "regex parse error:\n    (\n    ^\nerror: unclosed group\n",
                "a regular expression is invalid: a group is not closed",
            ),
            ("NoExtensionBias\n<non-verbose/>", "the grammar accepts no text"),
            ("\n", "the grammar is invalid"),
            (
                "at 3(14): unknown name: \"b\"\n3 | a: b\n       ^",
                "line 3, column 14: `b` is not defined",
            ),
            (
                "2(1): Expected token Colon, found Comma (at , (Comma))\n",
                "line 2, column 1: the grammar continues with a wrong symbol",
            ),
            ("at EOF: Expected value", "end of the grammar: a symbol or text is missing"),
            (
                "at 1(8): invalid regex \"(\" (in x): regex parse error:\n    (\n    ^\nerror: unclosed group",
                "line 1, column 8: a regular expression is invalid: a group is not closed",
            ),
            (
                "at 1(8): failed to compile JSON schema: Unimplemented keys: [\"a\"]",
                "line 1, column 8: an embedded JSON schema is invalid: the keyword `a` cannot be enforced",
            ),
            (
                "Unsatisfiable schema: required property 'x' is unsatisfiable",
                "the schema accepts no value: the property `x`, which must exist, accepts no value",
            ),
            (
                "Expected f64 for 'minimum', got {\"a\": 1}",
                "the value of `minimum` has the wrong type",
            ),
            ("unknown name: \"a b <backtrace>\"", "it is not defined"),
        ] {
            assert_eq!(client_text(text), expected);
        }
        let error = anyhow::Error::msg("at 3(14): unknown name: \"b\"");
        assert_eq!(client_message(&error, false).to_string(), "`b` is not defined");
    }

    #[test]
    fn texts_without_an_entry_are_logged_but_not_sent() {
        for text in [
            "panic: attempt to multiply with overflow\n<backtrace>\n0: rust_begin_unwind",
            "Internal error: no such row",
            "at /home/user/engine: rule x",
            "thread 'main' panicked",
            "A text of a later version",
        ] {
            let GrammarError::Failed { detail } = converted(text) else { panic!("{text}") };
            assert_eq!(detail, text);
            assert_eq!(client_text(text), "the grammar cannot be compiled");
        }
        let GrammarError::Failed { detail } = converted(&"?".repeat(9_000)) else { panic!() };
        assert_eq!(detail.len(), LOG_CHARS_MAX);
    }
}
