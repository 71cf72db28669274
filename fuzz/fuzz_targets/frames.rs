//! libFuzzer over `tests/decoders/frames.rs`.
#![no_main]

#[path = "../../tests/decoders/frames.rs"]
mod frames;

libfuzzer_sys::fuzz_target!(|data: &[u8]| frames::run(data));
