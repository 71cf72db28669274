//! Compares every CPU kernel of every instruction set with a plain f64 reference, over odd shapes, and checks
//! batch invariance: a row's result depends only on that row.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod attention;
mod linear;
mod mla;
mod qk_norm;
mod rows;
mod support;
