//! Token ids that the post-processor of a tokenizer adds around every text (BOS, EOS).

use protocol::Token;

/// Token ids that the post-processor adds before and after a text.
#[derive(Debug)]
pub(super) struct PostProcessorTokens {
    pub(super) before: Vec<Token>,
    pub(super) after: Vec<Token>,
}

impl PostProcessorTokens {
    /// Determines the added token ids by encoding a short text with the post-processor; `None` if the result
    /// does not contain the ids of the short text unchanged.
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Option<Self> {
        const PROBE: &str = "a";
        let ids = |special: bool| Some(inner.encode_fast(PROBE, special).ok()?.get_ids().to_vec());
        let (plain, encoded) = (ids(false)?, ids(true)?);
        let at = encoded.windows(plain.len().max(1)).position(|part| *part == plain)?;
        let (before, after) = (encoded[..at].to_vec(), encoded[at + plain.len()..].to_vec());
        Some(Self { before, after })
    }
}
