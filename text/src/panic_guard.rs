//! Converts panics of third-party crates to errors. These crates process the data of model folders and
//! requests, so invalid data may cause a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`, which calls the crate named `library`. `work` must leave no partly modified state if it
/// panics.
///
/// Errors: `work` panicked; the panic message is in the log.
pub(super) fn catch_panic<T>(library: &str, work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| format!("the {library} panicked"))
}
