//! Messages between the server and a grammar worker process, in the frame format of executor links.

use crate::compile::{DryRunReport, GrammarError};
use crate::constraint::OutputConstraint;
use crate::vocabulary::GrammarVocabulary;
use crate::worker_process::{EPOCH, decode_message, encode_message};
use protocol::Token;
use protocol::codec::{CodecError, WireMessage};
use protocol::frame::{self, FrameError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Kind of request messages, distinct from the message kinds of executors.
const WORKER_REQUEST_KIND: u16 = 65;
/// Kind of reply messages, distinct from the message kinds of executors.
const WORKER_REPLY_KIND: u16 = 66;

/// Message to the worker process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum GrammarWorkerRequest {
    /// The process must load the vocabulary with low priority. Optional; sent before `Vocabulary`.
    LowerPriority,
    /// Vocabulary; sent once, before any constraint.
    Vocabulary(VocabularyMessage),
    /// Grammar that the process must compile and run on random tokens (dry run), to measure its cost before
    /// the server uses it.
    Constraint(Arc<OutputConstraint>),
}

/// Vocabulary as sent to the worker process: token bytes and special token ids, without the tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VocabularyMessage {
    /// Bytes of each token, by token id, as in `GrammarVocabulary::tokens`.
    pub(super) tokens: Vec<Vec<u8>>,
    pub(super) special: Vec<Token>,
    pub(super) end_ids: Vec<Token>,
}

/// Message from the worker process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum GrammarWorkerReply {
    /// The worker process has loaded the vocabulary.
    Ready,
    /// Result of the dry run (test compilation) of a constraint.
    Verdict(Result<DryRunReport, GrammarError>),
}

/// Encodes the vocabulary frame, which is the same for all worker processes of a server.
///
/// Errors: the tokens exceed the maximum frame size.
pub(crate) fn vocabulary_frame(vocabulary: &GrammarVocabulary) -> Result<Vec<u8>, FrameError> {
    let GrammarVocabulary { tokens, special, end_ids, .. } = vocabulary;
    let message = VocabularyMessage {
        tokens: tokens.clone(),
        special: special.clone(),
        end_ids: end_ids.clone(),
    };
    let mut out = Vec::new();
    frame::encode(&GrammarWorkerRequest::Vocabulary(message), EPOCH, &mut out)?;
    Ok(out)
}

impl WireMessage for GrammarWorkerRequest {
    fn kind(&self) -> u16 {
        WORKER_REQUEST_KIND
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(WORKER_REQUEST_KIND, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(WORKER_REQUEST_KIND, kind, body)
    }
}

impl WireMessage for GrammarWorkerReply {
    fn kind(&self) -> u16 {
        WORKER_REPLY_KIND
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_message(WORKER_REPLY_KIND, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        decode_message(WORKER_REPLY_KIND, kind, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GrammarSpec, JsonWhitespace};
    use serde_json::{Value, json};
    use std::time::Duration;

    fn round_trip<M: WireMessage>(message: &M) -> M {
        let mut out = Vec::new();
        frame::encode(message, EPOCH, &mut out).unwrap();
        let decoded = frame::decode(&out).unwrap().unwrap();
        assert_eq!((decoded.epoch, decoded.frame_bytes), (EPOCH, out.len()));
        assert!(
            frame::decode::<M>(&out[..out.len() - 1]).unwrap().is_none(),
            "the frame is incomplete"
        );
        decoded.message
    }

    /// Returns a schema with the maximum nesting depth.
    fn deep() -> Value {
        (0..crate::NESTING_MAX).fold(json!("(a)"), |inner, _| json!({"items": inner}))
    }

    #[test]
    fn constraints_round_trip() {
        let schema = json!({"z": 1, "a": [-7, 0.1, 1e300, 1.0, u64::MAX, i64::MIN, null, "\u{0}ü"],
            "of": {"properties": {}, "y": true}});
        let spaced = JsonWhitespace::Pattern("[ \\t]*".to_owned());
        for spec in [
            GrammarSpec::Json { schema: schema.clone(), whitespace: spaced },
            GrammarSpec::Json { schema: deep(), whitespace: JsonWhitespace::Any },
            GrammarSpec::Json { schema: Value::Bool(true), whitespace: JsonWhitespace::None },
            GrammarSpec::Regex("(a|\u{1f980})*".to_owned()),
            GrammarSpec::Choice(vec![String::new(), "no\n".to_owned()]),
            GrammarSpec::Lark("start: \"x\"".to_owned()),
        ] {
            let sent = OutputConstraint::new(spec, "structured_outputs.json");
            for sent in [sent.clone(), sent.start_after("</think>")] {
                let sent = Arc::new(sent);
                let GrammarWorkerRequest::Constraint(received) =
                    round_trip(&GrammarWorkerRequest::Constraint(Arc::clone(&sent)))
                else {
                    panic!("expected a constraint")
                };
                assert_eq!(received, sent);
                assert_eq!(received.cache_key(), sent.cache_key(), "members keep their order");
            }
        }
    }

    #[test]
    fn vocabularies_and_verdicts_round_trip() {
        let vocabulary = GrammarWorkerRequest::Vocabulary(VocabularyMessage {
            tokens: vec![Vec::new(), vec![0, 127, 128, 255], b"the".to_vec()],
            special: vec![2, 70_000],
            end_ids: vec![2],
        });
        assert_eq!(round_trip(&vocabulary), vocabulary);
        let report = DryRunReport { slowest_mask: Duration::from_nanos(1_234_567_891) };
        for verdict in [
            Ok(report),
            Err(GrammarError::TooLarge { bytes: usize::MAX }),
            Err(GrammarError::InvalidSpaces("unclosed group".to_owned())),
        ] {
            let sent = GrammarWorkerReply::Verdict(verdict);
            assert_eq!(round_trip(&sent), sent);
        }
        let mut out = Vec::new();
        frame::encode(&GrammarWorkerReply::Ready, EPOCH, &mut out).unwrap();
        assert!(frame::decode::<GrammarWorkerRequest>(&out).is_err(), "a reply is not a request");
    }
}
