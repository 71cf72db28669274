//! Philox4x32-10, a counter-based random number generator, and Gumbel noise derived from it.
//!
//! The key is the 64-bit Philox key of the request, low word first. The counter is (token id / 4, draw,
//! position, 0); word `id mod 4` of the result belongs to token id `id`. The generator has no state, so a
//! preempted request gets the same noise again when it resumes.

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Number of counters that are computed at a time, in SIMD lanes.
pub(super) const LANES: usize = 16;

/// `draw` word of the Philox counter for the Gumbel noise of sampling a token.
pub(super) const DRAW_TOKEN: u32 = 0;
/// `draw` word of the Philox counter for the random number that decides whether a draft token is accepted.
/// Each position uses one random word, that of token id 0.
pub(super) const DRAW_ACCEPT: u32 = 1;
/// `draw` word of the Philox counter for resampling the token that replaces a rejected draft token.
pub(super) const DRAW_RESIDUAL: u32 = 2;

/// Computes one Philox block: four random words.
#[must_use]
#[cfg(test)]
pub(super) fn philox4x32_10(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut words = counter.map(|word| [word; 1]);
    rounds(key, &mut words);
    words.map(|[word]| word)
}

/// Computes the random words of token ids `[first, first + 64)`: `words[w][c]` belongs to id `first + 4 c +
/// w`.
#[inline(always)]
pub(super) fn chunk_words(key: u64, first: usize, position: u32) -> [[u32; LANES]; 4] {
    let mut words = [[0; LANES], [DRAW_TOKEN; LANES], [position; LANES], [0; LANES]];
    for (lane, word) in words[0].iter_mut().enumerate() {
        *word = (first / 4 + lane) as u32;
    }
    rounds(key, &mut words);
    words
}

#[inline(always)]
fn rounds<const N: usize>(key: u64, words: &mut [[u32; N]; 4]) {
    let mut k = [key as u32, (key >> 32) as u32];
    for _ in 0..ROUNDS {
        #[expect(clippy::needless_range_loop, reason = "four arrays share the index")]
        for lane in 0..N {
            let a = u64::from(words[0][lane]) * u64::from(MULTIPLIER[0]);
            let b = u64::from(words[2][lane]) * u64::from(MULTIPLIER[1]);
            words[0][lane] = (b >> 32) as u32 ^ words[1][lane] ^ k[0];
            words[2][lane] = (a >> 32) as u32 ^ words[3][lane] ^ k[1];
            words[1][lane] = b as u32;
            words[3][lane] = a as u32;
        }
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
}

/// Converts a random word to a number in (0, 1).
#[must_use]
pub(super) fn unit(word: u32) -> f32 {
    const TOP: f32 = 1.0 - 1.0 / 16_777_216.0;
    ((word as f32 + 0.5) * (1.0 / 4_294_967_296.0)).min(TOP)
}

/// Converts a random word to standard Gumbel noise: `−ln E` with `E = −ln(1 − u)`, where `u` in (0, 1) is
/// [`unit()`] of the word.
#[must_use]
pub(super) fn gumbel(word: u32) -> f32 {
    let e = -f64::from(-unit(word)).ln_1p() as f32;
    -f64::from(e).ln() as f32
}

/// Random word of one token id at a position.
#[must_use]
pub(super) fn word(key: u64, draw: u32, id: u32, position: u32) -> u32 {
    let mut words = [[id / 4], [draw], [position], [0]];
    rounds(key, &mut words);
    words[id as usize % 4][0]
}

/// Gumbel noise of one token id at a position.
#[must_use]
pub(super) fn noise(key: u64, id: u32, position: u32) -> f32 {
    gumbel(word(key, DRAW_TOKEN, id, position))
}

/// Returns an upper bound of the random words whose Gumbel noise is at least `min_noise`; `None` if no word
/// has such noise. Lets the sampler skip the logarithms for tokens that cannot win.
///
/// Since `u <= E` (see [`gumbel`]), `gumbel(word) >= min_noise` implies `u <= exp(-min_noise)`. The factor
/// 1.00002 covers rounding errors.
pub(super) fn highest_word(min_noise: f32) -> Option<u32> {
    let bound = f64::from(1.000_02 * (-min_noise).exp()) * 4_294_967_296.0;
    (bound >= 0.49).then_some(bound as u32)
}
