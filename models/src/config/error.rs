//! Errors of parsing `config.json` and `generation_config.json`. Every variant names the file; most also name
//! the field.

use std::path::PathBuf;

/// Error of reading a model configuration, or a configuration that is not supported.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The file exceeds the size limit.
    #[error("{path}: {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Path of the file.
        path: PathBuf,
        /// Size of the file in bytes.
        bytes: u64,
        /// Size limit in bytes.
        limit: u64,
    },
    /// The file is not a JSON object.
    #[error("{path}: not a JSON object: {detail}")]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// Position and reason of the parse error.
        detail: String,
    },
    /// A required field is missing.
    #[error("{path}: field `{field}` is missing")]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// Name of the field.
        field: String,
    },
    /// A field has the wrong type or is out of range.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    WrongType {
        /// Path of the file.
        path: PathBuf,
        /// Name of the field.
        field: String,
        /// Expected value.
        expected: String,
        /// Value that was found, as JSON.
        found: String,
    },
    /// The architecture is not supported.
    #[error("{path}: field `architectures`: `{found}` is not supported; supported are {supported}")]
    Architecture {
        /// Path of the file.
        path: PathBuf,
        /// Architecture that was found.
        found: String,
        /// Supported architectures.
        supported: String,
    },
    /// A field requests a feature that is not supported. Ignoring the field would change the output.
    #[error("{path}: field `{field}`: {found} is not supported: {why}")]
    Unsupported {
        /// Path of the file.
        path: PathBuf,
        /// Name of the field.
        field: String,
        /// Value that was found, as JSON.
        found: String,
        /// Reason, or the values that are supported instead.
        why: String,
    },
    /// Two fields contradict each other.
    #[error("{path}: field `{field}`: {detail}")]
    Contradiction {
        /// Path of the file.
        path: PathBuf,
        /// Field that is probably wrong.
        field: String,
        /// Values that contradict each other.
        detail: String,
    },
}
