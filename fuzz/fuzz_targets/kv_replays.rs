//! libFuzzer over `tests/decoders/kv_replays.rs`.
#![no_main]

#[path = "../../tests/decoders/kv_replays.rs"]
mod kv_replays;

libfuzzer_sys::fuzz_target!(|data: &[u8]| kv_replays::run(data));
