//! SentencePiece model files: the fields of the protobuf messages (`sentencepiece_model.proto`) that the
//! conversion needs.

use prost::Message;

/// Value of `TrainerSpec::model_type` for a unigram model.
pub(super) const UNIGRAM: i32 = 1;
/// Value of `TrainerSpec::model_type` for a BPE model.
pub(super) const BPE: i32 = 2;

/// Protobuf message `ModelProto`: the contents of a SentencePiece model file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SentencePieceModel {
    /// Pieces by id.
    #[prost(message, repeated, tag = "1")]
    pub(super) pieces: Vec<ScoredPiece>,
    #[prost(message, optional, tag = "2")]
    pub(super) trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub(super) normalizer_spec: Option<NormalizerSpec>,
    #[prost(message, optional, tag = "5")]
    pub(super) denormalizer_spec: Option<NormalizerSpec>,
}

/// Protobuf message `SentencePiece`: a vocabulary piece with its score and kind.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ScoredPiece {
    #[prost(string, optional, tag = "1")]
    pub(super) piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub(super) score: Option<f32>,
    /// One of the constants of `SentencePieceKind`; absent for a normal piece.
    #[prost(int32, optional, tag = "3")]
    pub(super) kind: Option<i32>,
}

/// Protobuf message `TrainerSpec` of a SentencePiece model.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TrainerSpec {
    #[prost(int32, optional, tag = "3", default = "1")]
    pub(super) model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub(super) treat_whitespace_as_suffix: Option<bool>,
    #[prost(int32, optional, tag = "40", default = "0")]
    pub(super) unk_id: Option<i32>,
    #[prost(int32, optional, tag = "41", default = "1")]
    pub(super) bos_id: Option<i32>,
    #[prost(int32, optional, tag = "42", default = "2")]
    pub(super) eos_id: Option<i32>,
}

/// Protobuf message `NormalizerSpec` of a SentencePiece model.
#[derive(Clone, PartialEq, Message)]
pub(super) struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(super) precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    pub(super) add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    pub(super) remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5", default = "true")]
    pub(super) escape_whitespaces: Option<bool>,
}

/// Kind of a piece (vocabulary entry) of a SentencePiece model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SentencePieceKind {
    Normal,
    Unknown,
    /// Special token, which encoding a text never produces.
    Control,
    /// Text that is always encoded as one token.
    UserDefined,
    /// Piece that encoding a text never produces.
    Unused,
    /// Byte `<0xNN>`.
    Byte,
}

impl ScoredPiece {
    /// Returns the kind of the piece; `None` if the value is unknown.
    pub(super) fn piece_kind(&self) -> Option<SentencePieceKind> {
        match self.kind.unwrap_or(1) {
            1 => Some(SentencePieceKind::Normal),
            2 => Some(SentencePieceKind::Unknown),
            3 => Some(SentencePieceKind::Control),
            4 => Some(SentencePieceKind::UserDefined),
            5 => Some(SentencePieceKind::Unused),
            6 => Some(SentencePieceKind::Byte),
            _ => None,
        }
    }
}

impl SentencePieceModel {
    /// Parses the contents of a model file.
    pub(super) fn read(contents: &[u8]) -> Result<Self, String> {
        let model = Self::decode(contents)
            .map_err(|error| format!("not a SentencePiece model: {error}"))?;
        if model.pieces.is_empty() {
            return Err("not a SentencePiece model: no pieces".to_owned());
        }
        Ok(model)
    }
}
