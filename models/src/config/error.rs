//! Errors of parsing `config.json` and `generation_config.json`. Every variant names the file; most also name
//! the field.

use std::path::PathBuf;

/// Error while a model configuration is read: the configuration is invalid or not supported.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    /// The configuration file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// Path of the configuration file.
        path: PathBuf,
        /// Error of the operating system while the file was read.
        error: std::io::Error,
    },
    /// The model folder has no configuration file.
    #[error("{dir}: no config.json{hint}")]
    Absent {
        /// Path of the model folder.
        dir: PathBuf,
        /// Format of the model instead, and the remedy; may be empty.
        hint: &'static str,
    },
    /// The configuration file exceeds the size limit.
    #[error("{path}: {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Path of the configuration file.
        path: PathBuf,
        /// Size of the configuration file in bytes.
        bytes: u64,
        /// Size limit of configuration files in bytes.
        limit: u64,
    },
    /// The configuration file is not a JSON object.
    #[error("{path}: not a JSON object: {detail}")]
    Json {
        /// Path of the configuration file.
        path: PathBuf,
        /// Position and reason of the parse error.
        detail: String,
    },
    /// A required field is missing in the configuration file.
    #[error("{path}: field `{field}` is missing")]
    Missing {
        /// Path of the configuration file.
        path: PathBuf,
        /// Name of the missing field.
        field: String,
    },
    /// A field of the configuration file has the wrong type or is out of range.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    WrongType {
        /// Path of the configuration file.
        path: PathBuf,
        /// Name of the invalid field.
        field: String,
        /// Description of the values that are valid for the field.
        expected: String,
        /// Invalid value in the configuration file, as JSON.
        found: String,
    },
    /// The model architecture is not supported.
    #[error("{path}: field `architectures`: `{found}` is not supported; supported are {supported}")]
    Architecture {
        /// Path of the configuration file.
        path: PathBuf,
        /// Architecture that the configuration file names.
        found: String,
        /// Names of the supported architectures.
        supported: String,
    },
    /// A field of the configuration file requests a feature that is not supported. If the field were ignored,
    /// the output of the model would be wrong.
    #[error("{path}: field `{field}`: {found} is not supported: {why}")]
    Unsupported {
        /// Path of the configuration file.
        path: PathBuf,
        /// Name of the field that requests the feature.
        field: String,
        /// Value of the field, as JSON.
        found: String,
        /// Reason why the value is not supported, or the values that are supported instead.
        why: String,
    },
    /// Two fields of the configuration file contradict each other.
    #[error("{path}: field `{field}`: {detail}")]
    Contradiction {
        /// Path of the configuration file.
        path: PathBuf,
        /// Name of the field that is probably wrong.
        field: String,
        /// Text with the values that contradict each other.
        detail: String,
    },
}
