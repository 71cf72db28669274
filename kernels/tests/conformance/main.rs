//! Compares every CPU kernel of every instruction set with a simple f64 reference, for shapes that are no
//! multiples of tile sizes, and checks batch invariance: a row's result depends only on that row.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod attention;
mod linear;
mod mla;
mod qk_norm;
mod recurrent;
#[path = "../gpu/replay_case.rs"]
mod replay_case;
mod rows;
mod state_replay;
mod support;
