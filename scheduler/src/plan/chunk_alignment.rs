//! Alignment of prefill chunks.

/// Returns the length of the next prefill chunk `[start, start + len)`, at most `cap`, of a request of which
/// `uncomputed` tokens are uncomputed.
///
/// The chunk contains all uncomputed tokens if they fit. Otherwise its *end* is aligned to `quantum`, and
/// with it the start of the next chunk. A chunk that would not reach the next multiple of `quantum` is
/// postponed, unless the step has no other prefill chunk: decode rows must never starve prefill.
pub(super) fn align_chunk(
    start: u32,
    uncomputed: u32,
    cap: u32,
    quantum: u32,
    step_has_prefill: bool,
) -> u32 {
    if uncomputed <= cap {
        return uncomputed;
    }
    let end = (start + cap) / quantum * quantum;
    if end > start {
        end - start
    } else if step_has_prefill {
        0
    } else {
        cap
    }
}
