//! libFuzzer over `tests/decoders/tokenizers.rs`.
#![no_main]

#[path = "../../tests/decoders/tokenizers.rs"]
mod tokenizers;

libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| tokenizers::run(data));
