//! The rules of ARCHITECTURE.md that can be checked automatically: the crate graph, permitted users of
//! dependencies, and required and forbidden contents of source files. Sizes are printed, never enforced.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod deploy;
mod figures;
mod graph;
mod ignored_tests;
mod lexicon;
mod models_page;
mod mutants;
mod reliability;
mod sizes;
mod source_tree;
mod sources;
