//! Every kernel of every instruction set against a plain f64 reference, over shapes that are multiples
//! of nothing; and the promise that a row's result depends on nothing but the row.

#![allow(clippy::unwrap_used, reason = "a test fails where an unwrap does")]

mod attention;
mod linear;
mod mla;
mod rows;
mod support;
