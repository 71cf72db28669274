//! Checks the rules of ARCHITECTURE.md that can be checked automatically: crate dependencies, users of
//! third-party crates, and required and forbidden contents of source files. File sizes are printed, but never
//! fail a build.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod deploy;
mod figures;
mod graph;
mod ignored_tests;
mod lexicon;
mod log_fields;
mod models_page;
mod mutants;
mod reliability;
mod sizes;
mod source_tree;
mod sources;
