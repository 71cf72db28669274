//! Decodes the arguments of a custom tool's function, the JSON object `{"input": text}`, to the text. The
//! arguments arrive in parts; the decoded text does not depend on where the arguments are split.

use std::mem;

/// Expected start of the arguments; whitespace is allowed at the positions in `SPACED`.
const START: &[u8] = b"{\"input\":\"";
/// Indices in `START` before which JSON allows whitespace.
const SPACED: [usize; 4] = [0, 1, 8, 9];

/// Position of the decoder within the arguments of a custom tool call.
#[derive(Debug, Clone, Default)]
enum CustomInputDecoderState {
    /// Inside `START`: `matched` characters of it have been read, and `head` contains all text read so far.
    #[default]
    Start,
    /// Inside the string that contains the input text.
    Text,
    /// Inside the string, after a backslash.
    Escape,
    /// Inside `\uXXXX`: the number of digits read so far, and their value.
    Unicode { digits: u8, value: u16 },
    /// After the text; the rest of the object is ignored.
    End,
    /// The arguments do not have the form `{"input": text}`, so they are returned unchanged.
    Raw,
}

/// Incremental decoder for the arguments of one call.
#[derive(Debug, Clone, Default)]
pub(crate) struct CustomToolInputDecoder {
    state: CustomInputDecoderState,
    matched: usize,
    head: String,
    /// High surrogate whose low surrogate has not been read yet.
    high: Option<u16>,
}

impl CustomToolInputDecoder {
    /// Decodes the complete arguments of a custom tool call to the input text.
    pub(crate) fn decode(arguments: &str) -> String {
        let mut decoder = Self::default();
        let mut text = decoder.push(arguments);
        text.push_str(&decoder.finish());
        text
    }

    /// Decodes the next part of the arguments; returns the decoded input text.
    pub(crate) fn push(&mut self, part: &str) -> String {
        let mut text = String::new();
        for c in part.chars() {
            self.char(c, &mut text);
        }
        text
    }

    /// Ends the decoding; the arguments may be incomplete. Returns the input text that has not been
    /// returned yet.
    pub(crate) fn finish(&mut self) -> String {
        let mut text = mem::take(&mut self.head);
        self.end_surrogate(&mut text);
        text
    }

    fn char(&mut self, c: char, text: &mut String) {
        match self.state {
            CustomInputDecoderState::Start => self.start(c, text),
            CustomInputDecoderState::Text => match c {
                '\\' => self.state = CustomInputDecoderState::Escape,
                '"' => {
                    self.end_surrogate(text);
                    self.state = CustomInputDecoderState::End;
                }
                c => self.put(c, text),
            },
            CustomInputDecoderState::Escape if c == 'u' => {
                self.state = CustomInputDecoderState::Unicode { digits: 0, value: 0 };
            }
            CustomInputDecoderState::Escape => {
                self.state = CustomInputDecoderState::Text;
                self.put(unescaped(c), text);
            }
            CustomInputDecoderState::Unicode { digits, value } => {
                let value = value << 4 | c.to_digit(16).unwrap_or(0) as u16;
                self.state = CustomInputDecoderState::Unicode { digits: digits + 1, value };
                if digits == 3 {
                    self.state = CustomInputDecoderState::Text;
                    self.code_unit(value, text);
                }
            }
            CustomInputDecoderState::End => {}
            CustomInputDecoderState::Raw => text.push(c),
        }
    }

    fn start(&mut self, c: char, text: &mut String) {
        self.head.push(c);
        if START.get(self.matched).is_some_and(|&byte| char::from(byte) == c) {
            self.matched += 1;
            if self.matched == START.len() {
                self.head.clear();
                self.state = CustomInputDecoderState::Text;
            }
        } else if !(SPACED.contains(&self.matched) && c.is_ascii_whitespace()) {
            text.push_str(&mem::take(&mut self.head));
            self.state = CustomInputDecoderState::Raw;
        }
    }

    /// Appends the character of a `\uXXXX` escape; a surrogate pair forms one character.
    fn code_unit(&mut self, unit: u16, text: &mut String) {
        match (self.high.take(), unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                let pair = char::decode_utf16([high, unit]).next();
                text.push(pair.and_then(Result::ok).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            (high, unit) => {
                self.high = high;
                self.end_surrogate(text);
                match unit {
                    0xd800..=0xdbff => self.high = Some(unit),
                    unit => text
                        .push(char::from_u32(unit.into()).unwrap_or(char::REPLACEMENT_CHARACTER)),
                }
            }
        }
    }

    fn put(&mut self, c: char, text: &mut String) {
        self.end_surrogate(text);
        text.push(c);
    }

    /// Replaces an unpaired high surrogate by U+FFFD.
    fn end_surrogate(&mut self, text: &mut String) {
        if self.high.take().is_some() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Returns the character of the JSON escape `\c`.
fn unescaped(c: char) -> char {
    match c {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASES: [(&str, &str); 11] = [
        (r#"{"input": "a b"}"#, "a b"),
        ("\n{ \"input\" : \"x\\n\\\"y\\\"\\\\\" , \"more\": 1}", "x\n\"y\"\\"),
        (r#"{"input": "\u00e9\ud83d\ude00\u0041"}"#, "é😀A"),
        (r#"{"input": "\ud83dx\ude00\ud83d"}"#, "\u{fffd}x\u{fffd}\u{fffd}"),
        (r#"{"input": ""}"#, ""),
        (r#"{"input": "cut \u00"#, "cut "),
        (r#"{"input": "cut \ud83d"#, "cut \u{fffd}"),
        (r#"{"patch": "x"}"#, r#"{"patch": "x"}"#),
        (r#"{"in put": "x"}"#, r#"{"in put": "x"}"#),
        (r#"{"input": 7}"#, r#"{"input": 7}"#),
        ("{", "{"),
    ];

    #[test]
    fn input_is_decoded_from_any_split() {
        for (arguments, expected) in CASES {
            assert_eq!(CustomToolInputDecoder::decode(arguments), expected, "{arguments}");
            let mut decoder = CustomToolInputDecoder::default();
            let mut text = String::new();
            for c in arguments.chars() {
                text.push_str(&decoder.push(c.encode_utf8(&mut [0; 4])));
            }
            text.push_str(&decoder.finish());
            assert_eq!(text, expected, "{arguments} in characters");
        }
    }

    #[test]
    fn every_json_string_is_decoded() {
        let text: String = (0..0x300u32).filter_map(char::from_u32).collect();
        let arguments = serde_json::json!({"input": text}).to_string();
        assert_eq!(CustomToolInputDecoder::decode(&arguments), text);
    }
}
