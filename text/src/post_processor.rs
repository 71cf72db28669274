//! Token ids that a tokenizer's post-processor adds around every text.

use protocol::Token;

/// Tokens that the post-processor adds before and after a text.
#[derive(Debug)]
pub(super) struct PostProcessorTokens {
    pub(super) before: Vec<Token>,
    pub(super) after: Vec<Token>,
}

impl PostProcessorTokens {
    /// Determines the tokens; `None` if the effect of the post-processor is unclear.
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Option<Self> {
        const PROBE: &str = "a";
        let ids = |special: bool| Some(inner.encode_fast(PROBE, special).ok()?.get_ids().to_vec());
        let (plain, encoded) = (ids(false)?, ids(true)?);
        let at = encoded.windows(plain.len().max(1)).position(|part| *part == plain)?;
        let (before, after) = (encoded[..at].to_vec(), encoded[at + plain.len()..].to_vec());
        Some(Self { before, after })
    }
}
