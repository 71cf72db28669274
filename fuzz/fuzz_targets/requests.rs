//! libFuzzer over `tests/decoders/requests.rs`.
#![no_main]

#[path = "../../tests/decoders/requests.rs"]
mod requests;

libfuzzer_sys::fuzz_target!(|data: &[u8]| requests::run(data));
