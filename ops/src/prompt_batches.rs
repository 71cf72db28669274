//! Steps with prompts whose kernels are compiled before a model serves.

use kernels::GatedDeltaRule;

/// Smallest number of tokens of a prompt in `prompt_batches`.
const PROMPT_TOKENS_MIN: u32 = 32;
/// Number of tokens of the shortest row whose gated delta rule is computed in chunks.
const SHORT_PROMPT_TOKENS: u32 = GatedDeltaRule::RECURRENT_TOKENS as u32 + 1;

/// Returns the row lengths of steps with a prompt alone, and with as many decode rows as possible before it, and of a step with
/// as many short prompts as possible. The kernels of linear layers and experts depend on the number of tokens, for which two
/// values per power of two are used; the kernel of the gated delta rule depends on the number of prompts. The largest step has
/// `tokens_max` tokens, and steps have at most `rows_max` rows.
#[must_use]
pub fn prompt_batches(tokens_max: u32, rows_max: u32) -> Vec<Vec<u32>> {
    let powers = (PROMPT_TOKENS_MIN.ilog2()..u32::BITS).map(|exponent| 1 << exponent);
    let counts = powers.flat_map(|tokens: u32| [tokens, tokens + tokens / 2]);
    let counts = counts.take_while(|&tokens| tokens < tokens_max).chain([tokens_max]);
    let batches = counts.flat_map(|tokens| {
        // A prompt of fewer tokens could be a row of draft tokens.
        let decodes = rows_max.saturating_sub(1).min(tokens.saturating_sub(PROMPT_TOKENS_MIN));
        let mut mixed = vec![1; decodes as usize];
        mixed.push(tokens - decodes);
        [vec![tokens], mixed]
    });
    let prompts = rows_max.min(tokens_max / SHORT_PROMPT_TOKENS);
    batches.chain((prompts > 0).then(|| vec![SHORT_PROMPT_TOKENS; prompts as usize])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_batches_reach_the_largest_step_with_all_rows() {
        let batches = prompt_batches(100, 8);
        let tokens: Vec<u32> = batches.iter().map(|lens| lens.iter().sum()).collect();
        assert_eq!(tokens, [32, 32, 48, 48, 64, 64, 96, 96, 100, 100, 90]);
        assert_eq!(batches[10], [18; 5]);
        assert_eq!(batches[0], [32]);
        assert_eq!(batches[1], [32], "no decode rows");
        assert_eq!(batches[3], [1, 1, 1, 1, 1, 1, 1, 41]);
        assert_eq!(batches[9], [1, 1, 1, 1, 1, 1, 1, 93]);
        assert_eq!(prompt_batches(16, 8), [[16], [16]]);
    }
}
