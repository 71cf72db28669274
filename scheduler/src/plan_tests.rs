//! Tables for `plan`.
