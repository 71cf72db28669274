//! SentencePiece models (`tokenizer.model`), converted as `LlamaConverter` of transformers does.

use super::sentencepiece_model::{
    BPE, ScoredPiece, SentencePieceKind, SentencePieceModel, TrainerSpec, UNIGRAM,
};
use super::sentencepiece_text::SentencePieceStages;
use super::{ConversionContext, TOKEN_BYTES_MAX, added_token};
use protocol::Token;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Difference between the lowest score of the pieces that can occur in encoded texts and the score that is
/// given to pieces that must not occur.
const UNUSED_PIECE_COST: f32 = 1e6;

/// A vocabulary piece with its token string.
struct NamedPiece {
    text: String,
    score: f32,
    kind: SentencePieceKind,
}

impl NamedPiece {
    /// Whether encoding a text can produce this piece.
    fn is_text(&self) -> bool {
        matches!(self.kind, SentencePieceKind::Normal | SentencePieceKind::UserDefined)
    }
}

/// Merge of two pieces into `text`; `at` is the byte offset between the two pieces.
struct PieceMerge<'a> {
    text: &'a str,
    score: f32,
    at: usize,
    left: Token,
    right: Token,
}

pub(super) fn convert(
    contents: &[u8],
    context: &mut ConversionContext<'_>,
) -> Result<Value, String> {
    let model = SentencePieceModel::read(contents)?;
    if !matches!(context.class.as_deref(), Some("LlamaTokenizer" | "CodeLlamaTokenizer")) {
        return Err(context.unsupported_class());
    }
    check_supported(&model)?;
    let spec = model.trainer_spec.clone().unwrap_or_default();
    let pieces = named_pieces(model.pieces.iter(), context)?;
    let mut ids = HashMap::with_capacity(pieces.len());
    for (id, piece) in (0..).zip(&pieces) {
        if ids.insert(piece.text.as_str(), id).is_some() {
            return Err(format!("piece {id}: {:?} occurs twice", piece.text));
        }
    }
    let roles =
        [("unk_token", spec.unk_id()), ("bos_token", spec.bos_id()), ("eos_token", spec.eos_id())];
    for (role, id) in roles {
        if let Some(piece) = usize::try_from(id).ok().and_then(|id| pieces.get(id)) {
            context.declared.add_default_role(role, &piece.text);
        }
    }
    let added = (0..).zip(&pieces).filter_map(|(id, piece)| match piece.kind {
        SentencePieceKind::Control | SentencePieceKind::Unknown => {
            Some(added_token(id, &piece.text, true))
        }
        SentencePieceKind::UserDefined => Some(added_token(id, &piece.text, false)),
        SentencePieceKind::Normal | SentencePieceKind::Unused | SentencePieceKind::Byte => None,
    });
    let steps = SentencePieceStages::new(&model.normalizer_spec.unwrap_or_default(), context);
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.collect::<Vec<Value>>(),
        "normalizer": steps.normalizer,
        "pre_tokenizer": steps.pre_tokenizer,
        "post_processor": context.post_processor(true, |text| ids.get(text).copied()),
        "decoder": steps.decoder,
        "model": model_json(&spec, &pieces, &ids),
    }))
}

/// Checks that the model has no property that the `tokenizers` crate does not support.
fn check_supported(model: &SentencePieceModel) -> Result<(), String> {
    let spec = model.trainer_spec.clone().unwrap_or_default();
    let normalizer = model.normalizer_spec.clone().unwrap_or_default();
    let denormalizer = model.denormalizer_spec.clone().unwrap_or_default();
    let unused = |piece: &ScoredPiece| piece.piece_kind() == Some(SentencePieceKind::Unused);
    let unsupported = [
        (![UNIGRAM, BPE].contains(&spec.model_type()), "model_type other than unigram and BPE"),
        (spec.treat_whitespace_as_suffix(), "treat_whitespace_as_suffix"),
        (!normalizer.escape_whitespaces(), "escape_whitespaces: false"),
        (!denormalizer.precompiled_charsmap().is_empty(), "denormalizer_spec"),
        (model.pieces.iter().any(unused), "unused pieces"),
    ];
    match unsupported.into_iter().find(|(is_present, _)| *is_present) {
        Some((_, property)) => {
            Err(format!("{property}: this SentencePiece model is not supported"))
        }
        None => Ok(()),
    }
}

/// Returns the vocabulary pieces with their token strings; a declared added token overrides the piece with
/// the same id.
fn named_pieces<'a>(
    pieces: impl Iterator<Item = &'a ScoredPiece>,
    context: &ConversionContext<'_>,
) -> Result<Vec<NamedPiece>, String> {
    let named = (0..).zip(pieces).map(|(id, piece)| {
        let declared = context.declared.added_token(id).map(|token| token.content.as_str());
        let text = declared.unwrap_or(piece.piece()).to_owned();
        if text.is_empty() || text.len() > TOKEN_BYTES_MAX {
            return Err(format!("piece {id}: {} bytes; 1 to {TOKEN_BYTES_MAX}", text.len()));
        }
        let kind = piece.piece_kind().ok_or_else(|| format!("piece {id}: unknown type"))?;
        Ok(NamedPiece { text, score: piece.score(), kind })
    });
    named.collect()
}

fn model_json(spec: &TrainerSpec, pieces: &[NamedPiece], ids: &HashMap<&str, Token>) -> Value {
    if spec.model_type() == UNIGRAM {
        return json!({"type": "Unigram", "unk_id": spec.unk_id(), "vocab": scored_vocab(pieces),
            "byte_fallback": true});
    }
    let vocab: serde_json::Map<String, Value> =
        (0..).zip(pieces).map(|(id, piece)| (piece.text.clone(), json!(id as Token))).collect();
    let unknown = usize::try_from(spec.unk_id()).ok().and_then(|id| pieces.get(id));
    json!({"type": "BPE", "dropout": null, "unk_token": unknown.map(|piece| &piece.text),
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
        "byte_fallback": true, "ignore_merges": false, "vocab": vocab,
        "merges": merges(pieces, ids)})
}

/// Returns the vocabulary pieces with their scores. SentencePiece never encodes text as a byte or control
/// piece whose string equals the text, so these pieces get a score so low that no segmentation uses them.
fn scored_vocab(pieces: &[NamedPiece]) -> Vec<Value> {
    let texts = pieces.iter().filter(|piece| piece.is_text());
    let lowest = texts.map(|piece| piece.score).fold(0.0, f32::min);
    let score = |piece: &NamedPiece| {
        f64::from(if piece.is_text() { piece.score } else { lowest - UNUSED_PIECE_COST })
    };
    pieces.iter().map(|piece| json!([piece.text, score(piece)])).collect()
}

/// Returns all merges of two pieces into one piece, in merge order: by descending score of the merged piece.
/// If a piece can be split in several ways, the split with the longest left part comes first.
fn merges(pieces: &[NamedPiece], ids: &HashMap<&str, Token>) -> Vec<Value> {
    let id_of = |text: &str| ids.get(text).copied().filter(|id| pieces[*id as usize].is_text());
    let mut splits = Vec::new();
    for NamedPiece { text, score, .. } in pieces.iter().filter(|piece| piece.is_text()) {
        let split = |(at, _): (usize, char)| {
            let (left, right) = (id_of(&text[..at])?, id_of(&text[at..])?);
            Some(PieceMerge { text, score: *score, at, left, right })
        };
        let first = splits.len();
        splits.extend(text.char_indices().skip(1).filter_map(split));
        splits[first..].sort_by_key(|split: &PieceMerge<'_>| (split.left, split.right));
    }
    splits.sort_by(|a, b| {
        let parts = |split: &PieceMerge<'_>| {
            let (left, right) = split.text.split_at(split.at);
            (left.chars().count(), right.chars().count())
        };
        b.score.total_cmp(&a.score).then_with(|| parts(b).cmp(&parts(a)))
    });
    let pair = |split: &PieceMerge<'_>| json!([split.text[..split.at], split.text[split.at..]]);
    splits.iter().map(pair).collect()
}
