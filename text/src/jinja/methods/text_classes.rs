//! Methods that test the characters of a string.

use super::super::error::JinjaResult;
use super::super::python_text::{is_printable, is_space};
use super::super::unicode::{ALPHABETIC, DECIMAL, DIGIT, NUMERIC, is_in};
use super::super::value::JinjaValue;
use super::MethodFunction;
use super::text_case::{is_cased, is_title};

/// Returns the method `name`.
pub(super) fn find(name: &str) -> Option<MethodFunction> {
    macro_rules! test {
        ($test:expr) => {
            |evaluator, value, arguments| {
                arguments.expect_none("str method")?;
                let text = value.as_str().unwrap_or_default();
                evaluator.spend_bytes(text.len())?;
                let test: fn(&str) -> bool = $test;
                JinjaResult::Ok(JinjaValue::Bool(test(text)))
            }
        };
    }
    Some(match name {
        "isalnum" => test!(|text| all(text, is_alphanumeric)),
        "isalpha" => test!(|text| all(text, is_alphabetic)),
        "isascii" => test!(str::is_ascii),
        "isdecimal" => test!(|text| all(text, |c| is_in(DECIMAL, c))),
        "isdigit" => test!(|text| all(text, |c| is_in(DIGIT, c))),
        "isnumeric" => test!(|text| all(text, |c| is_in(NUMERIC, c))),
        "isidentifier" => test!(is_identifier),
        "islower" => test!(is_lower),
        "isupper" => test!(is_upper),
        "istitle" => test!(is_title_text),
        "isprintable" => test!(|text| text.chars().all(is_printable)),
        "isspace" => test!(|text| all(text, is_space)),
        _ => return None,
    })
}

fn all(text: &str, test: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(test)
}

fn is_alphabetic(c: char) -> bool {
    is_in(ALPHABETIC, c)
}

/// Whether a character is a letter or a number.
pub(crate) fn is_alphanumeric(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_alphanumeric();
    }
    is_alphabetic(c) || is_in(DECIMAL, c) || is_in(DIGIT, c) || is_in(NUMERIC, c)
}

fn is_identifier(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c == '_' || c.is_alphabetic());
    begins && text.chars().all(|c| c == '_' || c.is_alphabetic() || is_in(DECIMAL, c))
}

/// Whether a string has cased characters and all of them are in lower case.
pub(crate) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| c.is_uppercase() || is_title(c))
}

/// Whether a string has cased characters and all of them are in upper case.
pub(crate) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| c.is_lowercase() || is_title(c))
}

fn is_title_text(text: &str) -> bool {
    let mut follows_cased = false;
    let mut has_cased = false;
    for c in text.chars() {
        let is_capital = c.is_uppercase() || is_title(c);
        if is_capital && follows_cased || c.is_lowercase() && !follows_cased {
            return false;
        }
        follows_cased = is_cased(c);
        has_cased |= follows_cased;
    }
    has_cased
}
