//! Tests of the wire format: exact bytes, frames and streams.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::needless_raw_string_hashes, reason = "expect-test writes them")]

#[path = "../../../tests/support/deadlines.rs"]
mod deadlines;
mod frames;
mod golden;
mod messages;
mod streams;
