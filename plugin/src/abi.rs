//! Exported functions. `include/hadron.h` describes the interface; this file converts pointers to references.

use std::ffi::{CStr, c_char};

use crate::call::{CallStatus, ErrorText, ModelHandle, run, run_with_model, write_text};
use crate::{
    ForeignArray, ForeignModel, ForeignRanks, ForeignStep, ModelCounters, PluginError,
    PluginOptions,
};

/// Version of the interface, `HADRON_ABI_VERSION` in `include/hadron.h`.
pub const ABI_VERSION: u32 = 2;

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => panic!("the version has no nul"),
    };

/// Returns the version of the interface.
#[unsafe(no_mangle)]
pub extern "C" fn hadron_abi_version() -> u32 {
    ABI_VERSION
}

/// Returns the version of Hadron.
#[unsafe(no_mangle)]
pub extern "C" fn hadron_version() -> *const c_char {
    VERSION.as_ptr()
}

/// Loads a model.
///
/// # Safety
/// `options` has `options_bytes` bytes, `ranks` is null or valid, `model` is valid for a write, and `error` is null or has
/// `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_open(
    options: *const c_char,
    options_bytes: u64,
    ranks: *const ForeignRanks,
    model: *mut *mut ModelHandle,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let open = || {
        if options.is_null() {
            return Err(PluginError::Null { argument: "options" });
        }
        if model.is_null() {
            return Err(PluginError::Null { argument: "model" });
        }
        // SAFETY: the caller guarantees the pointers.
        let (bytes, ranks) = unsafe {
            *model = std::ptr::null_mut();
            let bytes = std::slice::from_raw_parts(options.cast::<u8>(), options_bytes as usize);
            (bytes, ranks.as_ref())
        };
        let json = std::str::from_utf8(bytes);
        let json = json.map_err(|_| PluginError::NotUtf8 { argument: "options" })?;
        // SAFETY: the caller guarantees the communication of the host.
        let opened = unsafe { ForeignModel::open(PluginOptions::parse(json)?, ranks)? };
        let handle = Box::into_raw(Box::new(ModelHandle::new(opened)));
        // SAFETY: the caller guarantees the pointer.
        unsafe { *model = handle };
        Ok(())
    };
    // SAFETY: the caller guarantees the memory of the text.
    unsafe { run(ErrorText { text: error, room }, open) as i32 }
}

/// Writes facts about the model as JSON.
///
/// # Safety
/// `model` is a model of `hadron_open`; `json` has `json_room` bytes, and `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_describe(
    model: *mut ModelHandle,
    json: *mut c_char,
    json_room: u64,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let describe = |model: &mut ForeignModel| {
        let text = model.description()?;
        if json.is_null() {
            return Err(PluginError::Null { argument: "json" });
        }
        // SAFETY: the caller guarantees the memory.
        if unsafe { write_text(json, json_room, &text) } {
            return Ok(());
        }
        let (argument, needed) = ("json", text.len() as u64 + 1);
        Err(PluginError::TooSmall { argument, got: json_room, needed })
    };
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, describe) as i32 }
}

/// Compiles kernels and allocates memory for all steps.
///
/// # Safety
/// `model` is a model of `hadron_open`, and `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_rehearse(
    model: *mut ModelHandle,
    error: *mut c_char,
    room: u64,
) -> i32 {
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, ForeignModel::rehearse) as i32 }
}

/// Binds the memory of the KV cache.
///
/// # Safety
/// `model` is a model of `hadron_open`, `layers` has `count` arrays of device memory that exists until the next binding, and
/// `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_bind_kv(
    model: *mut ModelHandle,
    layers: *const ForeignArray,
    count: u64,
    blocks: u64,
    block_tokens: u64,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let bind = |model: &mut ForeignModel| {
        if layers.is_null() {
            return Err(PluginError::Null { argument: "layers" });
        }
        // SAFETY: the caller guarantees the arrays and their memory.
        unsafe {
            let layers = std::slice::from_raw_parts(layers, count as usize);
            model.bind_kv(layers, blocks as usize, block_tokens as usize)
        }
    };
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, bind) as i32 }
}

/// Runs the forward pass of a step.
///
/// # Safety
/// `model` is a model of `hadron_open`, `step` is valid with arrays of device memory that exists until its launches have
/// completed, and `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_forward(
    model: *mut ModelHandle,
    step: *const ForeignStep,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let forward = |model: &mut ForeignModel| {
        // SAFETY: the caller guarantees the step and its memory.
        unsafe {
            let step = step.as_ref().ok_or(PluginError::Null { argument: "step" })?;
            model.forward(step)
        }
    };
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, forward) as i32 }
}

/// Computes the logits of hidden states.
///
/// # Safety
/// `model` is a model of `hadron_open`, `hidden` and `logits` are arrays of device memory that exists until the launches have
/// completed, and `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_logits(
    model: *mut ModelHandle,
    stream: u64,
    hidden: *const ForeignArray,
    logits: *const ForeignArray,
    rows: u64,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let compute = |model: &mut ForeignModel| {
        // SAFETY: the caller guarantees the arrays and their memory.
        unsafe {
            let hidden = hidden.as_ref().ok_or(PluginError::Null { argument: "hidden" })?;
            let logits = logits.as_ref().ok_or(PluginError::Null { argument: "logits" })?;
            model.logits(stream, hidden, logits, rows as usize)
        }
    };
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, compute) as i32 }
}

/// Writes the counters of the model.
///
/// # Safety
/// `model` is a model of `hadron_open`, `counters` is valid for a write, and `error` is null or has `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_count(
    model: *mut ModelHandle,
    counters: *mut ModelCounters,
    error: *mut c_char,
    room: u64,
) -> i32 {
    let count = |model: &mut ForeignModel| {
        if counters.is_null() {
            return Err(PluginError::Null { argument: "counters" });
        }
        // SAFETY: the caller guarantees the pointer.
        unsafe { *counters = model.counters() };
        Ok(())
    };
    // SAFETY: the caller guarantees the model and the memory of the text.
    unsafe { run_with_model(model, ErrorText { text: error, room }, count) as i32 }
}

/// Frees a model.
///
/// # Safety
/// `model` is null or a model of `hadron_open`, which is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hadron_close(model: *mut ModelHandle) {
    if model.is_null() {
        return;
    }
    let no_text = ErrorText { text: std::ptr::null_mut(), room: 0 };
    let close = || {
        // SAFETY: the caller guarantees the model.
        drop(unsafe { Box::from_raw(model) });
        Ok(())
    };
    // SAFETY: there is no memory for a text.
    let _: CallStatus = unsafe { run(no_text, close) };
}
