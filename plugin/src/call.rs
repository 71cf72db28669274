//! Result of a call across the C interface: a status, and a text if the call failed.

use std::any::Any;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, TryLockError};

use crate::{ForeignModel, PluginError};

/// Result of a call, as `hadron_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallStatus {
    Ok = 0,
    Rejected = 1,
    Failed = 2,
    Bug = 3,
}

/// Memory of the host for the text of an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorText {
    pub(crate) text: *mut c_char,
    pub(crate) room: u64,
}

impl ErrorText {
    /// Writes as much of `message` as fits, cut at a character boundary, and a final nul.
    ///
    /// # Safety
    /// `text` is null, or valid for writes of `room` bytes.
    unsafe fn write(self, message: &str) {
        // SAFETY: the caller guarantees the memory.
        unsafe { write_text(self.text, self.room, message) };
    }
}

/// Writes as much of `message` to `text` as fits in `room` bytes, and a final nul. Returns whether all of it fits.
///
/// # Safety
/// `text` is null, or valid for writes of `room` bytes.
pub(crate) unsafe fn write_text(text: *mut c_char, room: u64, message: &str) -> bool {
    let Some(space) = (room as usize).checked_sub(1).filter(|_| !text.is_null()) else {
        return false;
    };
    let len = message.floor_char_boundary(space);
    // SAFETY: `len` is at most `room - 1`; the caller guarantees the memory.
    unsafe {
        std::ptr::copy_nonoverlapping(message.as_ptr().cast(), text, len);
        *text.add(len) = 0;
    }
    len == message.len()
}

/// A model with the text of the failure after which it cannot be used.
pub(crate) struct ModelCell {
    pub(crate) model: ForeignModel,
    failure: Option<String>,
}

/// A model of a host. The lock detects calls that overlap in time.
pub struct ModelHandle(Mutex<ModelCell>);

impl ModelHandle {
    pub(crate) fn new(model: ForeignModel) -> Self {
        Self(Mutex::new(ModelCell { model, failure: None }))
    }
}

/// Runs `call` and returns its status. A panic does not leave this function.
///
/// # Safety
/// `error` is as [`ErrorText::write`] requires.
pub(crate) unsafe fn run(
    error: ErrorText,
    call: impl FnOnce() -> Result<(), PluginError>,
) -> CallStatus {
    let (status, message) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return CallStatus::Ok,
        Ok(Err(error)) if error.is_rejection() => (CallStatus::Rejected, error.to_string()),
        Ok(Err(error)) => (CallStatus::Failed, error.to_string()),
        Err(panic) => (CallStatus::Bug, format!("panic: {}", panic_text(&*panic))),
    };
    // SAFETY: the caller guarantees the memory.
    unsafe { error.write(&message) };
    status
}

/// Runs `call` with a model. After a failure or a panic, later calls with this model are failures too.
///
/// # Safety
/// `handle` is null or a model that `hadron_open` returned and `hadron_close` did not free; `error` is as
/// [`ErrorText::write`] requires.
pub(crate) unsafe fn run_with_model(
    handle: *mut ModelHandle,
    error: ErrorText,
    call: impl FnOnce(&mut ForeignModel) -> Result<(), PluginError>,
) -> CallStatus {
    let locked = || {
        // SAFETY: the caller guarantees the model.
        let handle = unsafe { handle.as_ref() }.ok_or(PluginError::Null { argument: "model" })?;
        let mut cell = match handle.0.try_lock() {
            Ok(cell) => cell,
            Err(TryLockError::WouldBlock) => return Err(PluginError::OverlappingCalls),
            Err(TryLockError::Poisoned(_)) => {
                return Err(PluginError::FailedBefore("a panic".to_owned()));
            }
        };
        if let Some(failure) = &cell.failure {
            return Err(PluginError::FailedBefore(failure.clone()));
        }
        let result = call(&mut cell.model);
        if let Err(error) = &result
            && !error.is_rejection()
        {
            cell.failure = Some(error.to_string());
        }
        result
    };
    // SAFETY: the caller guarantees the memory.
    unsafe { run(error, locked) }
}

/// Returns the text of a panic.
fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_a_status_and_a_text() {
        let mut text = [0u8; 22];
        let error = ErrorText { text: text.as_mut_ptr().cast(), room: 22 };
        // SAFETY: the text has 22 bytes.
        let status = unsafe { run(error, || panic!("{} blocks, 2 × 8", 17)) };
        assert_eq!(status, CallStatus::Bug);
        assert_eq!(&text, b"panic: 17 blocks, 2 \0\0", "cut before a character of two bytes");
    }

    #[test]
    fn texts_are_cut_at_the_room_of_the_host() {
        let mut text = [1u8; 4];
        let to = text.as_mut_ptr().cast();
        // SAFETY: the text has 4 bytes; null has no room.
        unsafe {
            assert!(!write_text(to, 4, "abcd") && write_text(to, 4, "abc"));
            assert!(!write_text(to, 0, "a") && !write_text(std::ptr::null_mut(), 9, "a"));
        }
        assert_eq!(&text, b"abc\0");
    }
}
