//! Generates random outputs that match a grammar.

use crate::Tokenizer;
use grammar::GrammarSession;
use protocol::Token;

/// Number of consecutive tokens for which the generator tries the same text of `ends` first.
const TURN_TOKENS: usize = 30;
/// Number of tokens after which the generator closes open strings, lists and objects.
const FREE_TOKENS: usize = 60;
const TOKENS_MAX: usize = 1_500;

/// Unpredictable but reproducible choices.
struct RandomOutputRng(u64);

impl RandomOutputRng {
    fn below(&mut self, count: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % count
    }
}

/// Generates one random output that a grammar allows.
pub(super) struct RandomOutputGenerator<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Texts that close open strings, lists and objects, such as `"` and `]`.
    pub ends: Vec<&'a str>,
    /// Wherever the output may end, it ends with probability 1 / `stop_chance`.
    pub stop_chance: usize,
    /// Number of tokens after which the output ends at the first position at which it may end.
    pub stops_after: usize,
    /// Text with which the output begins; a byte of it that the grammar does not allow is replaced by a
    /// random token.
    pub start: &'a str,
    /// Whether special tokens are always preferred to other tokens while open strings, lists and objects are
    /// being closed.
    pub prefers_special: bool,
    pub seed: u64,
}

impl RandomOutputGenerator<'_> {
    /// Generates an output that the grammar allows.
    pub(super) fn output(&self, session: &mut GrammarSession) -> Result<String, String> {
        let Self { tokenizer, ends, stop_chance, stops_after, start, prefers_special, seed } = self;
        let (mut output, mut random) = (Vec::new(), RandomOutputRng(*seed));
        let end = tokenizer.eos_ids()[0];
        for step in 0..TOKENS_MAX {
            let text = String::from_utf8_lossy(&output).into_owned();
            let mask = session.mask().ok_or_else(|| format!("no mask after {text:?}"))?;
            let is_allowed = |token: Token| mask[token as usize / 32] >> (token % 32) & 1 == 1;
            let ids = 0..tokenizer.vocab_size() as Token;
            let allowed: Vec<Token> = ids.filter(|&id| id != end && is_allowed(id)).collect();
            let started = start.as_bytes().get(step).map(|&byte| Token::from(byte));
            let started = started.filter(|token| allowed.contains(token));
            let stops = started.is_none()
                && is_allowed(end)
                && (step > *stops_after || random.below(*stop_chance) == 0);
            if allowed.is_empty() || stops {
                return if is_allowed(end) {
                    Ok(text)
                } else {
                    Err(format!("no token after {text:?}"))
                };
            }
            let ending = step > FREE_TOKENS || random.below(8) == 0;
            // A text of `ends` may also be allowed inside a string, where it closes nothing. So each text is
            // the first one tried for some tokens, in rotation.
            let turn = step / TURN_TOKENS % ends.len();
            let in_turn = || ends[turn..].iter().chain(&ends[..turn]);
            let ends = || in_turn().filter_map(|end| next_byte(&output, end.as_bytes()));
            let continued = ends().filter(|next| next.matched > 0).map(|next| next.token);
            let begun = ends().map(|next| next.token);
            let special = allowed.iter().copied().find(|&id| tokenizer.is_special(id));
            let special = special.filter(|_| *prefers_special || step % 3 > 0);
            let wanted =
                special.into_iter().chain(continued).chain(begun).find(|id| allowed.contains(id));
            let plain: Vec<Token> =
                allowed.iter().copied().filter(|id| (32..127).contains(id) || *id == 10).collect();
            let plain = if plain.is_empty() { &allowed } else { &plain };
            let token = match (started, wanted) {
                (Some(started), _) => started,
                (None, Some(wanted)) if ending => wanted,
                _ => plain[random.below(plain.len())],
            };
            output.extend_from_slice(tokenizer.token_bytes(token));
            session.advance(&[token]);
        }
        Err(format!("no end: {:?}", String::from_utf8_lossy(&output)))
    }
}

/// Length of the longest prefix of an end text (a text of `ends`) that is a suffix of the output, and the
/// next byte of the end text.
struct EndTextMatch {
    matched: usize,
    token: Token,
}

fn next_byte(output: &[u8], end: &[u8]) -> Option<EndTextMatch> {
    let matched = (0..end.len()).rev().find(|&count| output.ends_with(&end[..count]))?;
    Some(EndTextMatch { matched, token: Token::from(end[matched]) })
}
