//! libFuzzer over `tests/decoders/templates.rs`.
#![no_main]

#[path = "../../tests/decoders/templates.rs"]
mod templates;

libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| templates::run(data));
