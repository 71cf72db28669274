//! Fuzz targets for all decoders of untrusted bytes, one file per decoder. Each file has a function `run`,
//! which decodes the data and checks the result. A decoder may return errors, but must not panic, and must
//! give consistent results.
//!
//! `replay` runs the committed corpus and random mutations of it at every `cargo test`; `just fuzz SECONDS`
//! (`fuzz/`) runs libFuzzer, guided by coverage.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]
#![allow(clippy::print_stdout, reason = "counts are shown even where they pass")]

mod configs;
mod frames;
mod grammars;
mod headers;
mod kv_replays;
mod outputs;
mod replay;
mod requests;
mod templates;
mod tokenizers;
