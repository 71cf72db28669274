//! Wire format: bytes, frames, streams.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

mod frames;
mod golden;
mod messages;
mod streams;
