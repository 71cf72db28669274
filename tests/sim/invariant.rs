//! Violations of invariants. The names (`I1` to `I24`, and names of guarantees such as `F25`) are defined in
//! the module comments of `tests/sim`.

/// Name of the violated invariant, and a description of the violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InvariantViolation {
    /// Name of the invariant or guarantee, as in the module comments of `tests/sim`: for example `I13` or
    /// `F25`.
    pub(crate) invariant: &'static str,
    /// Description of the state that violates the invariant.
    pub(crate) text: String,
}

impl std::fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} is broken: {}", self.invariant, self.text)
    }
}

/// Result of a check: `Ok`, or the first violation.
pub(crate) type CheckResult = Result<(), InvariantViolation>;

/// Returns `InvariantViolation` from the enclosing function unless the condition holds.
macro_rules! ensure {
    ($invariant:literal, $holds:expr, $($text:tt)+) => {
        if !$holds {
            return Err($crate::invariant::InvariantViolation { invariant: $invariant, text: format!($($text)+) });
        }
    };
}
pub(crate) use ensure;
