//! Encodes text in which some occurrences of special tokens, such as those typed by a user, must remain plain
//! text.
//!
//! The steps are those of Hugging Face `tokenizers` 0.22 (`AddedVocabulary::extract_and_normalize`): added
//! tokens are extracted from the raw text, then from the normalised pieces, and the text between them is
//! pre-tokenised and encoded. There is one difference: a special token is not extracted if its text contains
//! a protected position, that is, text from a user. Without protected positions the result equals that of
//! `tokenizers`.

use aho_corasick::{AhoCorasick, MatchKind};
use protocol::Token;
use std::collections::HashMap;
use tokenizers::tokenizer::normalizer::Range;
use tokenizers::tokenizer::pre_tokenizer::OffsetType;
use tokenizers::{
    AddedToken, Model as _, NormalizedString, Normalizer as _, OffsetReferential,
    PreTokenizedString, PreTokenizer as _, Result, Token as Piece,
};

/// Added token with its id.
#[derive(Debug, Clone)]
pub(super) struct IdentifiedAddedToken {
    pub(super) id: Token,
    pub(super) token: AddedToken,
}

impl IdentifiedAddedToken {
    /// Returns the added tokens of a tokenizer.
    pub(super) fn list(tokenizer: &tokenizers::Tokenizer) -> Vec<Self> {
        let tokens = tokenizer.get_added_tokens_decoder().into_iter();
        tokens.map(|(id, token)| Self { id, token }).collect()
    }
}

/// Search automata for the added tokens of one tokenizer (`added_tokens` in `tokenizer.json`), with the id of
/// each added token and the list of special tokens.
#[derive(Debug)]
pub(super) struct AddedTokenMatcher {
    raw: AddedTokenFinder,
    normalized: AddedTokenFinder,
    special: Vec<String>,
    ids: HashMap<String, Token>,
}

impl AddedTokenMatcher {
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> std::result::Result<Self, String> {
        let tokens = IdentifiedAddedToken::list(tokenizer);
        let special = tokens.iter().map(|added| &added.token);
        let special = special.filter(|token| token.special && !token.content.is_empty());
        let mut special: Vec<String> = special.map(|token| token.content.clone()).collect();
        special.sort_unstable();
        let ids = tokens.iter().map(|added| (added.token.content.clone(), added.id)).collect();
        let (normalized, raw): (Vec<_>, Vec<_>) =
            tokens.into_iter().partition(|added| added.token.normalized);
        let normalized_text = |token: &AddedToken| {
            let mut text = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut text).map_err(|e| e.to_string())?;
            }
            Ok(text.get().to_owned())
        };
        Ok(Self {
            raw: AddedTokenFinder::new(raw, |t| Ok(t.content.clone()))?,
            normalized: AddedTokenFinder::new(normalized, normalized_text)?,
            special,
            ids,
        })
    }

    pub(super) fn special_token_strings(&self) -> &[String] {
        &self.special
    }

    /// Returns the id of the added token `text`.
    pub(super) fn id(&self, text: &str) -> Option<Token> {
        self.ids.get(text).copied()
    }

    /// Returns the pre-tokens of `text`. `protected_positions` are the byte positions, in ascending order, of
    /// user text that must not become part of a special token.
    pub(super) fn pre_tokenize(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        protected_positions: &[usize],
    ) -> Result<PreTokenizedString> {
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, piece| self.raw.split(&piece, protected_positions))?;
        pieces.split(|_, mut piece| {
            if let Some(normalizer) = tokenizer.get_normalizer() {
                normalizer.normalize(&mut piece)?;
            }
            self.normalized.split(&piece, protected_positions)
        })?;
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        Ok(pieces)
    }
}

/// Returns the byte positions in the original text at which the pre-tokens begin, in ascending order.
pub(super) fn pre_token_starts(pieces: &PreTokenizedString) -> Vec<usize> {
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(_, (from, _), _)| from).collect()
}

/// Encodes the pre-tokens that begin before byte `end` of the original text, and appends their token ids to
/// `ids`. Each pre-token is encoded separately and its intermediate result is dropped immediately: keeping
/// the results of all pre-tokens would take most of the tokenisation memory.
pub(super) fn append_ids(
    tokenizer: &tokenizers::Tokenizer,
    pieces: &PreTokenizedString,
    end: usize,
    ids: &mut Vec<Token>,
) -> Result<()> {
    for (piece, (from, _), tokens) in
        pieces.get_splits(OffsetReferential::Original, OffsetType::Byte)
    {
        if from >= end {
            break;
        }
        match tokens {
            Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            None => ids.extend(tokenizer.get_model().tokenize(piece)?.iter().map(|token| token.id)),
        }
    }
    Ok(())
}

/// Search automaton for the added tokens that are matched before normalisation, or for those matched after
/// normalisation. Matching is leftmost-longest.
#[derive(Debug)]
struct AddedTokenFinder {
    automaton: AhoCorasick,
    tokens: Vec<IdentifiedAddedToken>,
}

/// A text split at its added tokens, in order. `Some` contains an added token; `None` means text without
/// added tokens.
type AddedTokenSplits = Vec<(NormalizedString, Option<Vec<Piece>>)>;

impl AddedTokenFinder {
    fn new(
        mut tokens: Vec<IdentifiedAddedToken>,
        normalized_text: impl Fn(&AddedToken) -> std::result::Result<String, String>,
    ) -> std::result::Result<Self, String> {
        tokens.retain(|added| !added.token.content.is_empty());
        tokens.sort_unstable_by_key(|added| added.id);
        let token_strings: Vec<String> = tokens
            .iter()
            .map(|added| normalized_text(&added.token))
            .collect::<std::result::Result<_, _>>()?;
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&token_strings)
            .map_err(|e| e.to_string())?;
        Ok(Self { automaton, tokens })
    }

    /// Splits `piece`, a part of a text, at the added tokens found in it. Each added token becomes a separate
    /// piece that carries its token id.
    fn split(
        &self,
        piece: &NormalizedString,
        protected_positions: &[usize],
    ) -> Result<AddedTokenSplits> {
        let text = piece.get();
        let mut splits = Vec::new();
        let mut done = 0;
        let slice = |from: usize, to: usize| {
            piece.slice(Range::Normalized(from..to)).ok_or("a token ends inside a character")
        };
        let mut search = 0;
        while let Some(found) = self.automaton.find(aho_corasick::Input::new(text).range(search..))
        {
            let IdentifiedAddedToken { id, token } = &self.tokens[found.pattern().as_usize()];
            let (mut from, mut to) = (found.start(), found.end());
            if token.special && covers_protected(piece, from, to, protected_positions) {
                // The special token found here covers a protected position (user text that must not become a
                // special token), so its text remains plain text. The search continues one character later,
                // because another added token may begin inside this text.
                search = from + text[from..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            search = to.max(search + 1);
            if token.single_word && !is_whole_word(text, from, to) {
                continue;
            }
            if token.lstrip {
                from = text[..from].trim_end().len().max(done);
            }
            if token.rstrip {
                to = text.len() - text[to..].trim_start().len();
            }
            if done < from {
                splits.push((slice(done, from)?, None));
            }
            let token_string = text[from..to].to_owned();
            let len = token_string.len();
            splits.push((slice(from, to)?, Some(vec![Piece::new(*id, token_string, (0, len))])));
            done = to;
            search = search.max(done);
        }
        if done < text.len() {
            splits.push((slice(done, text.len())?, None));
        }
        Ok(splits)
    }
}

/// Whether bytes `[from, to)` of `piece` contain a protected position, at which user text must not become
/// part of a special token. `protected_positions` are byte positions in the original text.
fn covers_protected(
    piece: &NormalizedString,
    from: usize,
    to: usize,
    protected_positions: &[usize],
) -> bool {
    let base = piece.offsets_original().0;
    let range = piece.convert_offsets(Range::Normalized(from..to)).unwrap_or(from..to);
    let (from, to) = (base + range.start, base + range.end);
    let next = protected_positions.partition_point(|&position| position < from);
    protected_positions.get(next).is_some_and(|&position| position < to)
}

/// Whether no letter, digit or underscore is adjacent to bytes `[from, to)` of `text`.
fn is_whole_word(text: &str, from: usize, to: usize) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    !text[..from].ends_with(word) && !text[to..].starts_with(word)
}
