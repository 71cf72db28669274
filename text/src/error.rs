//! What can go wrong with text, split by whose fault it is: the model folder's (before ready) or
//! the request's (a 400).

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The model folder cannot be used; start-up ends with this text.
#[derive(Debug, thiserror::Error)]
pub enum TextLoadError {
    /// A file that must exist does not.
    #[error("{}: missing; a model folder needs it", .0.display())]
    Missing(PathBuf),
    /// A file exists but cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// A file was read but says something that cannot be used.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, with names and numbers.
        reason: String,
    },
}

/// A request's text cannot be turned into ids; answered with 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TextError {
    /// The template called `raise_exception`: its text is meant for the user.
    #[error("the chat template refuses these messages: {0}")]
    TemplateException(String),
    /// The template failed on these messages; details belong in the log only.
    #[error("the chat template cannot render these messages")]
    Template(String),
    /// What the request gives as a template is none; details belong in the log only.
    #[error("this is no chat template")]
    InvalidRequestTemplate(String),
    /// The template ran longer than its fuel of so many instructions.
    #[error("rendering the chat template took more than {0} instructions")]
    TemplateFuelExhausted(u64),
    /// The template wrote more than the cap.
    #[error("the rendered prompt exceeds {0} bytes")]
    RenderedTooLong(usize),
    /// The template of a request took more than so many bytes of memory.
    #[error("rendering the chat template takes more than {0} bytes of memory")]
    TemplateMemory(u64),
    /// The template of a request took longer than so many seconds.
    #[error("rendering the chat template takes more than {0} s")]
    TemplateTime(u64),
    /// So many templates of requests are being rendered, which take long.
    #[error("{0} chat templates of requests are being rendered: try again later")]
    TemplatesBusy(u64),
    /// No process could be started for the template of a request.
    #[error("no process can be started to render the chat template: try again later")]
    NoTemplateProcess(String),
    /// The final message is absent from the rendered text, so that it cannot be continued.
    #[error("the chat template drops the final message, so it cannot be continued")]
    NothingToContinue,
    /// The text cannot be cut, and tokenising it as a whole would take more memory than all texts may.
    #[error(
        "{text_bytes} bytes of text without a change between letters, digits, spaces and punctuation take \
         {bytes} bytes of memory to tokenise, the limit is {limit}"
    )]
    TooMuchMemory {
        /// Bytes of the text.
        text_bytes: usize,
        /// Bytes that it would take.
        bytes: u64,
        /// Bytes that all texts may take.
        limit: u64,
    },
    /// Other texts take the memory for texts.
    #[error(
        "tokenising takes {bytes} bytes of memory, {used} of {limit} are in use: try again later"
    )]
    MemoryBusy {
        /// Bytes that the text would take.
        bytes: u64,
        /// Bytes that others take.
        used: u64,
        /// Bytes that all texts may take.
        limit: u64,
    },
    /// The tokenizer failed.
    #[error("the text cannot be tokenised")]
    Tokenizer(String),
}
