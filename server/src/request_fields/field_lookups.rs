//! Records of field lookups, from which the OpenAPI document is generated.

use std::ops::RangeInclusive;

/// Record of a field lookup; the OpenAPI document is generated from these records.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldLookupRecord {
    /// Name of the field.
    pub name: String,
    /// Type and range given in the lookup of the field.
    pub kind: FieldKind,
}

/// Type and range of a field, as far as its lookup specifies them.
#[derive(Debug, Clone, PartialEq)]
pub enum FieldKind {
    /// Any JSON value; the calling code checks it.
    Any,
    /// `true` or `false`.
    Bool,
    /// Integer in a range.
    Int(RangeInclusive<i64>),
    /// Number in a range.
    Float {
        /// Range of the number.
        range: RangeInclusive<f32>,
        /// Whether the lower bound is excluded.
        low_open: bool,
    },
    /// String of at most this number of bytes.
    Str(usize),
    /// List of integers in a range.
    Ints {
        /// Range of the integers.
        range: RangeInclusive<i64>,
        /// Maximum length of the list.
        len_max: usize,
    },
    /// List of non-empty strings of limited length.
    Strings {
        /// Maximum length of a string in bytes.
        bytes_max: usize,
        /// Maximum length of the list.
        len_max: usize,
    },
}
