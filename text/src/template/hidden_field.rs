//! Parts of a conversation that a chat template does not read.

/// Part of a [`ChatInput`](super::ChatInput) that does not change the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HiddenChatField {
    /// Tool definitions.
    Tools,
    /// Tool calls in messages.
    ToolCalls,
    /// Documents.
    Documents,
    /// Reasoning effort.
    ReasoningEffort,
    /// Variable of `chat_template_kwargs` with this name.
    TemplateVariable(String),
}
