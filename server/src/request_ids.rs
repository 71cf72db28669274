//! Generates unpredictable numbers for request ids and seeds: SipHash of a counter, with a key that the
//! operating system generates at startup.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use text::ToolCallIdFormat;

/// Generator of unpredictable numbers; there is one per process.
#[derive(Debug, Default)]
pub struct RequestIdGenerator {
    key: RandomState,
    next: AtomicU64,
}

impl RequestIdGenerator {
    /// Returns the next unpredictable number.
    pub fn next_u64(&self) -> u64 {
        self.key.hash_one(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns a new request id of 32 hex digits.
    pub fn id(&self) -> String {
        format!("{:016x}{:016x}", self.next_u64(), self.next_u64())
    }
}

/// Generator of the tool call ids of one reply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToolCallIdGenerator {
    seed: u64,
    format: ToolCallIdFormat,
    /// Number of tool calls in the conversation before the reply.
    earlier_calls: u32,
}

impl ToolCallIdGenerator {
    /// Creates a generator of tool call ids for the reply to a conversation with `earlier_calls` tool calls.
    /// `seed` determines the ids and must be unpredictable.
    pub(crate) fn new(seed: u64, format: ToolCallIdFormat, earlier_calls: u32) -> Self {
        Self { seed, format, earlier_calls }
    }

    /// Returns the id of tool call `index` of choice `choice`, which calls function `name`.
    pub(crate) fn id(&self, choice: u32, index: u32, name: &str) -> String {
        const LETTERS: &[u8; 62] =
            b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
        let (prefix, length) = match self.format {
            ToolCallIdFormat::Long => ("call_", 24),
            ToolCallIdFormat::Nine => ("", 9),
            ToolCallIdFormat::Function => {
                return format!("functions.{name}:{}", self.earlier_calls.saturating_add(index));
            }
        };
        let mut state = mix(self.seed ^ mix(u64::from(choice) << 32 | u64::from(index)));
        let letter = |_| {
            state = mix(state);
            char::from(LETTERS[(state % 62) as usize])
        };
        prefix.chars().chain((0..length).map(letter)).collect()
    }
}

/// Returns the splitmix64 output for `state`.
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the sampling RNG key of a choice: `mix(mix(seed) ^ choice)`.
pub(crate) fn sampling_key(seed: u64, choice: u64) -> u64 {
    mix(mix(seed) ^ choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_call_ids_match_their_format_and_differ() {
        let long = ToolCallIdGenerator::new(7, ToolCallIdFormat::Long, 3);
        let ids = [long.id(0, 0, "f"), long.id(0, 1, "f"), long.id(1, 0, "f")];
        for id in &ids {
            let tail = id.strip_prefix("call_").unwrap();
            assert!(tail.len() == 24 && tail.bytes().all(|b| b.is_ascii_alphanumeric()), "{id}");
        }
        assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
        assert_eq!(ToolCallIdGenerator::new(7, ToolCallIdFormat::Nine, 3).id(0, 0, "f").len(), 9);
        let function = ToolCallIdGenerator::new(7, ToolCallIdFormat::Function, 3);
        assert_eq!(function.id(0, 1, "get_time"), "functions.get_time:4");
    }

    #[test]
    fn sampling_keys_match_published_vectors() {
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(sampling_key(42, 0), 0x57e1_faba_6510_7204);
    }
}
