//! Everything that reads bytes of strangers, fed with strange bytes: one file for each decoder, whose `run` may refuse,
//! but neither panic nor contradict itself.
//!
//! `replay` gives each of them the committed corpus and random mutations of it at every `cargo test`;
//! `just fuzz SECONDS` (`fuzz/`) lets libFuzzer look for more, guided by coverage, some seconds at every change.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
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
