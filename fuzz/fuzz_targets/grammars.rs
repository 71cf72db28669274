//! libFuzzer over `tests/decoders/grammars.rs`.
#![no_main]

#[path = "../../tests/decoders/grammars.rs"]
mod grammars;

libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| grammars::run(data));
