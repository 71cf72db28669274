//! What libraries make of the data of model folders and requests: where they panic on it, it is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The outcome of `work`, which calls `library` and keeps nothing that a panic could leave half done.
///
/// Errors: it panicked; the panic itself is in the log.
pub(super) fn catch_panic<T>(library: &str, work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| format!("the {library} panicked"))
}
