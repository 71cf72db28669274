//! A broken invariant, named as in the list of invariants.

/// Which invariant broke and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broken {
    /// `I1` to `I22`, or the name of a promise.
    pub(crate) invariant: &'static str,
    /// What was seen.
    pub(crate) text: String,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is broken: {}", self.invariant, self.text)
    }
}

/// Result of a check.
pub(crate) type Checked = Result<(), Broken>;

/// Returns `Broken` from the enclosing function unless the condition holds.
macro_rules! ensure {
    ($invariant:literal, $holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err($crate::broken::Broken { invariant: $invariant, text: format!($($text)+) });
        }
    };
}
pub(crate) use ensure;
