//! libFuzzer over `tests/decoders/templates.rs`.
#![no_main]

#[path = "../../tests/decoders/templates.rs"]
mod templates;

libfuzzer_sys::fuzz_target!(|data: &[u8]| templates::run(data));
