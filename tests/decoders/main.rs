//! Fuzz targets for every decoder of untrusted bytes, one file per decoder. Each has a function `run`, which
//! decodes the data; the decoder may return errors, but must neither panic nor be inconsistent.
//!
//! `replay` runs the committed corpus and random mutations of it at every `cargo test`; `just fuzz SECONDS`
//! (`fuzz/`) runs libFuzzer, guided by coverage, for some seconds at every change.

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
