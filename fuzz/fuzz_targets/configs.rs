//! libFuzzer over `tests/decoders/configs.rs`.
#![no_main]

#[path = "../../tests/decoders/configs.rs"]
mod configs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| configs::run(data));
