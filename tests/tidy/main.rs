//! The rules of ARCHITECTURE.md that a machine can check: the crate graph, the home of every
//! dependency, and what source files must and must not contain. Sizes are printed, never enforced.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod deploy;
mod figures;
mod graph;
mod ignored_tests;
mod lexicon;
mod reliability;
mod sizes;
mod source_tree;
mod sources;
