//! libFuzzer over `tests/decoders/headers.rs`.
#![no_main]

#[path = "../../tests/decoders/headers.rs"]
mod headers;

libfuzzer_sys::fuzz_target!(|data: &[u8]| headers::run(data));
