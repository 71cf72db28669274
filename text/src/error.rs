//! Errors of the text layer: of the model folder (at startup) or of a request (a 400).

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The model folder cannot be used; startup fails with this message.
#[derive(Debug, thiserror::Error)]
pub enum TextLoadError {
    /// A required file is missing.
    #[error("{}: missing; a model folder requires it", .0.display())]
    Missing(PathBuf),
    /// A file exists but cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// A file has invalid contents.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// Reason, with names and numbers.
        reason: String,
    },
}

/// The text of a request cannot be tokenised; reported as 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TextError {
    /// The template called `raise_exception`; its message is meant for the user.
    #[error("the chat template raised an exception: {0}")]
    TemplateException(String),
    /// The template failed on these messages; details belong in the log only.
    #[error("the chat template cannot render these messages")]
    Template(String),
    /// The template in the request is invalid; details belong in the log only.
    #[error("invalid chat template")]
    InvalidRequestTemplate(String),
    /// The template exceeded its fuel, a number of instructions.
    #[error("rendering the chat template took more than {0} instructions")]
    TemplateFuelExhausted(u64),
    /// The template's output exceeded the limit in bytes.
    #[error("the rendered prompt exceeds {0} bytes")]
    RenderedTooLong(usize),
    /// The template of a request exceeded its memory limit in bytes.
    #[error("rendering the chat template takes more than {0} bytes of memory")]
    TemplateMemory(u64),
    /// The template of a request exceeded its time limit in seconds.
    #[error("rendering the chat template takes more than {0} s")]
    TemplateTime(u64),
    /// Too many templates of requests, which may be slow, are being rendered; the number is given.
    #[error("{0} chat templates of requests are being rendered: try again later")]
    TemplatesBusy(u64),
    /// No process could be started for the template of a request.
    #[error("no process can be started to render the chat template: try again later")]
    NoTemplateProcess(String),
    /// The final message is absent from the rendered text, so that it cannot be continued.
    #[error("the chat template omits the final message, so it cannot be continued")]
    NothingToContinue,
    /// The text cannot be split, and tokenising it as a whole would exceed the memory limit for all texts.
    #[error(
        "{text_bytes} bytes of text without a change between letters, digits, spaces and punctuation take \
         {bytes} bytes of memory to tokenise, the limit is {limit}"
    )]
    TooMuchMemory {
        /// Length of the text in bytes.
        text_bytes: usize,
        /// Bytes of memory that tokenising it would take.
        bytes: u64,
        /// Memory limit for all texts together, in bytes.
        limit: u64,
    },
    /// The memory limit for texts is reached by other requests.
    #[error(
        "tokenising takes {bytes} bytes of memory, {used} of {limit} are in use: try again later"
    )]
    MemoryBusy {
        /// Bytes of memory that tokenising the text would take.
        bytes: u64,
        /// Bytes of memory in use by other texts.
        used: u64,
        /// Memory limit for all texts together, in bytes.
        limit: u64,
    },
    /// The tokenizer failed.
    #[error("the text cannot be tokenised")]
    Tokenizer(String),
}
