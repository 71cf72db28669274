//! libFuzzer over `tests/decoders/outputs.rs`.
#![no_main]

#[path = "../../tests/decoders/outputs.rs"]
mod outputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| outputs::run(data));
