//! What a server and a process that tries grammars say to each other, in the frames of executors.

use crate::grammar::compile::{Findings, GrammarError};
use crate::grammar::constraint::Constraint;
use crate::grammar::vocabulary::Vocabulary;
use crate::worker_process::{EPOCH, decode_message, encode_message};
use protocol::Token;
use protocol::codec::{CodecError, Message};
use protocol::frame::{self, FrameError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Apart from the kinds of executors.
const TO_TRIAL: u16 = 65;
const FROM_TRIAL: u16 = 66;

/// To the process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum ToTrial {
    /// May come before everything: be of little priority while you learn the vocabulary.
    Yield,
    /// Comes first, once.
    Vocabulary(Words),
    /// A grammar to try.
    Constraint(Arc<Constraint>),
}

/// A vocabulary without its tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Words {
    /// As in `Vocabulary`.
    pub(super) tokens: Vec<Vec<u8>>,
    pub(super) special: Vec<Token>,
    pub(super) ends: Vec<Token>,
}

/// From it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromTrial {
    /// It knows the vocabulary.
    Ready,
    /// Of the grammar it was sent.
    Verdict(Result<Findings, GrammarError>),
}

/// The first frame, the same for every process of a server.
///
/// Errors: there are more tokens than a frame holds.
pub(in crate::grammar) fn vocabulary_frame(vocabulary: &Vocabulary) -> Result<Vec<u8>, FrameError> {
    let Vocabulary { tokens, special, ends, .. } = vocabulary;
    let words = Words { tokens: tokens.clone(), special: special.clone(), ends: ends.clone() };
    let mut out = Vec::new();
    frame::encode(&ToTrial::Vocabulary(words), EPOCH, &mut out)?;
    Ok(out)
}

impl Message for ToTrial {
    fn kind(&self) -> u16 {
        TO_TRIAL
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(TO_TRIAL, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(TO_TRIAL, kind, body)
    }
}

impl Message for FromTrial {
    fn kind(&self) -> u16 {
        FROM_TRIAL
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(FROM_TRIAL, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(FROM_TRIAL, kind, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grammar::{Form, Spaces};
    use serde_json::{Value, json};
    use std::time::Duration;

    fn through<M: Message>(message: &M) -> M {
        let mut out = Vec::new();
        frame::encode(message, EPOCH, &mut out).unwrap();
        let (back, epoch, bytes) = frame::decode(&out).unwrap().unwrap();
        assert_eq!((epoch, bytes), (EPOCH, out.len()));
        assert!(frame::decode::<M>(&out[..out.len() - 1]).unwrap().is_none(), "not all of it");
        back
    }

    /// As deep as schemas may be.
    fn deep() -> Value {
        (0..crate::grammar::NESTING_MAX).fold(json!("(a)"), |inner, _| json!({"items": inner}))
    }

    #[test]
    fn grammars_arrive_as_they_were_sent() {
        let schema = json!({"z": 1, "a": [-7, 0.1, 1e300, 1.0, u64::MAX, i64::MIN, null, "\u{0}ü"],
            "of": {"properties": {}, "y": true}});
        let spaced = Spaces::Pattern("[ \\t]*".to_owned());
        for form in [
            Form::Json { schema: schema.clone(), spaces: spaced },
            Form::Json { schema: deep(), spaces: Spaces::Any },
            Form::Json { schema: Value::Bool(true), spaces: Spaces::None },
            Form::Regex("(a|\u{1f980})*".to_owned()),
            Form::Choice(vec![String::new(), "no\n".to_owned()]),
            Form::Lark("start: \"x\"".to_owned()),
        ] {
            let sent = Constraint::new(form, "structured_outputs.json");
            for sent in [sent.clone(), sent.after("</think>")] {
                let sent = Arc::new(sent);
                let ToTrial::Constraint(got) = through(&ToTrial::Constraint(Arc::clone(&sent)))
                else {
                    panic!("another message")
                };
                assert_eq!(got, sent);
                assert_eq!(got.key(), sent.key(), "members in their order");
            }
        }
    }

    #[test]
    fn vocabularies_and_verdicts_arrive_as_they_were_sent() {
        let words = ToTrial::Vocabulary(Words {
            tokens: vec![Vec::new(), vec![0, 127, 128, 255], b"the".to_vec()],
            special: vec![2, 70_000],
            ends: vec![2],
        });
        assert_eq!(through(&words), words);
        let findings = Findings { slowest_mask: Duration::from_nanos(1_234_567_891) };
        for verdict in [
            Ok(findings),
            Err(GrammarError::TooLarge { bytes: usize::MAX }),
            Err(GrammarError::InvalidSpaces("unclosed group".to_owned())),
        ] {
            let sent = FromTrial::Verdict(verdict);
            assert_eq!(through(&sent), sent);
        }
        let mut out = Vec::new();
        frame::encode(&FromTrial::Ready, EPOCH, &mut out).unwrap();
        assert!(frame::decode::<ToTrial>(&out).is_err(), "of the other direction");
    }
}
