//! What can be wrong with a `config.json`. Every variant names the file and the field.

use std::path::PathBuf;

/// A configuration that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    /// The file cannot be read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is larger than any configuration.
    #[error("{path}: {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest accepted size.
        limit: u64,
    },
    /// The file is not a JSON object.
    #[error("{path}: not a JSON object: {detail}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where parsing stopped.
        detail: String,
    },
    /// A field without which the model is not defined.
    #[error("{path}: field `{field}` is missing")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
    },
    /// A field of the wrong type or range.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What would be right.
        expected: String,
        /// The JSON that is there.
        found: String,
    },
    /// An architecture nobody here implements.
    #[error("{path}: field `architectures`: `{found}` is not supported; supported are {supported}")]
    Architecture {
        /// The file.
        path: PathBuf,
        /// The architecture asked for.
        found: String,
        /// Those there are.
        supported: String,
    },
    /// A feature nobody here implements; ignoring it would give wrong text.
    #[error("{path}: field `{field}`: {found} is not supported: {why}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The JSON that is there.
        found: String,
        /// What is supported instead.
        why: String,
    },
    /// Two fields that cannot both be true.
    #[error("{path}: field `{field}`: {detail}")]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// The field that is probably wrong.
        field: String,
        /// The numbers.
        detail: String,
    },
}
