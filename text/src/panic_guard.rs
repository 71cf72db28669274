//! Converts panics of libraries on data of model folders and requests to errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`, which calls `library` and leaves no partly modified state if it panics.
///
/// Errors: `work` panicked; the panic itself is in the log.
pub(super) fn catch_panic<T>(library: &str, work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| format!("the {library} panicked"))
}
