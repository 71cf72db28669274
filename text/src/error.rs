//! Errors of tokenizers and chat templates: of a model folder (at startup), or of a request (HTTP status
//! 400).

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A model folder has no usable tokenizer or chat template; startup fails with this message.
#[derive(Debug, thiserror::Error)]
pub enum TextLoadError {
    /// A required file is missing.
    #[error("{}: missing; a model folder requires it", .0.display())]
    Missing(PathBuf),
    /// A model folder has none of the files that define a tokenizer.
    #[error(
        "{}: no tokenizer; looked for {}, merges.txt",
        .0.display(),
        super::tokenizer_files::TOKENIZER_FILES.join(", ")
    )]
    NoTokenizer(PathBuf),
    /// A file exists but cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// I/O error of the read.
        source: std::io::Error,
    },
    /// A file has invalid contents.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// What is invalid, with the names and values concerned.
        reason: String,
    },
}

/// The text of a request cannot be rendered or tokenised; reported with HTTP status 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TextError {
    /// The chat template called `raise_exception`, whose message is meant for the user.
    #[error("the chat template raised an exception: {0}")]
    TemplateException(String),
    /// The chat template failed on the messages of the request, for this reason.
    #[error("the chat template cannot render these messages: {}", shortened(.0))]
    Template(String),
    /// The chat template in the request is invalid, for this reason.
    #[error("invalid chat template: {}", shortened(.0))]
    InvalidRequestTemplate(String),
    /// The chat template renders user messages but omits messages of another role.
    #[error(
        "the chat template leaves out messages of role {}: remove message {index}, or use another role",
        shortened(.role)
    )]
    RoleNotShown {
        /// Index of the message in the conversation.
        index: usize,
        /// Role of the message.
        role: String,
    },
    /// The model has several chat templates, whose names are given here, but no default template for this
    /// kind of conversation.
    #[error("the model has no default chat template; set `chat_template` to one of: {0}")]
    NoDefaultTemplate(String),
    /// Rendering took more than this maximum number of template instructions.
    #[error("rendering the chat template took more than {0} instructions")]
    TemplateFuelExhausted(u64),
    /// The rendered prompt exceeded its maximum size in bytes.
    #[error("the rendered prompt exceeds {0} bytes")]
    RenderedTooLong(usize),
    /// A chat template sent in a request exceeded its memory limit in bytes.
    #[error("rendering the chat template takes more than {0} bytes of memory")]
    TemplateMemory(u64),
    /// A chat template sent in a request exceeded its time limit in seconds.
    #[error("rendering the chat template takes more than {0} s")]
    TemplateTime(u64),
    /// The maximum number of chat templates sent in requests, given here, is already being rendered.
    #[error("{0} chat templates of requests are being rendered: try again later")]
    TemplatesBusy(u64),
    /// No worker process could be started for a chat template sent in a request.
    #[error("no process can be started to render the chat template: try again later")]
    NoTemplateProcess(String),
    /// The message to be continued (`continue_final_message`) is absent from the rendered text.
    #[error("the chat template omits the final message, so it cannot be continued")]
    NothingToContinue,
    /// The text cannot be split into windows (parts that are tokenised separately), and tokenising it as a
    /// whole would exceed the memory budget of all texts.
    #[error(
        "{text_bytes} bytes of text without a change between letters, digits, spaces and punctuation take \
         {bytes} bytes of memory to tokenise, the limit is {limit}"
    )]
    TooMuchMemory {
        /// Length of the text in bytes.
        text_bytes: usize,
        /// Bytes of memory that tokenising the text would take.
        bytes: u64,
        /// Memory budget of all texts together, in bytes.
        limit: u64,
    },
    /// The text waited too long for tokenisation memory, because other texts use the memory budget.
    #[error(
        "tokenising takes {bytes} bytes of memory, {used} of {limit} are in use: try again later"
    )]
    MemoryBusy {
        /// Bytes of memory that tokenising the text would take.
        bytes: u64,
        /// Bytes of the memory budget in use by other texts.
        used: u64,
        /// Memory budget of all texts together, in bytes.
        limit: u64,
    },
    /// The `tokenizers` crate failed to encode the text.
    #[error("the text cannot be tokenised")]
    Tokenizer(String),
}

/// Maximum number of characters of a reason in an error sent to a client: a reason may repeat the client's
/// input.
const REASON_CHARS_SHOWN: usize = 300;

/// Returns the first `REASON_CHARS_SHOWN` characters of a reason.
fn shortened(reason: &str) -> String {
    reason.chars().take(REASON_CHARS_SHOWN).collect()
}

impl TextError {
    /// Returns the error with the characters removed that were inserted into the conversation before
    /// rendering (sentinels).
    pub(super) fn without_characters(mut self, is_added: impl Fn(char) -> bool) -> Self {
        if let Self::TemplateException(reason)
        | Self::Template(reason)
        | Self::InvalidRequestTemplate(reason)
        | Self::RoleNotShown { role: reason, .. } = &mut self
        {
            reason.retain(|c| !is_added(c));
        }
        self
    }
}
