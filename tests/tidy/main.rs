//! Checks the rules of ARCHITECTURE.md that can be checked automatically: dependencies between crates, use of
//! third-party crates, required and forbidden contents of source files, and lengths of files and functions.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

#[path = "../support/bounded_child.rs"]
mod bounded_child;

mod architecture_files;
mod deploy;
mod figures;
mod graph;
mod headings;
mod idioms;
mod ignored_tests;
mod lexicon;
mod log_fields;
mod models_page;
mod mutants;
mod prose_figures;
mod reliability;
mod sizes;
mod source_tree;
mod sources;
mod tuples;
mod waits;
