//! Grammars of the harmony format of gpt-oss: the headers of tool calls, the messages around them, and the
//! reasoning before a constrained answer.
//!
//! An output has at most one reasoning message, at most one preamble, and one answer or one call: after a
//! call, the model waits for the result.

use super::call_grammar::{CallGrammarWriter, CallWrapperText};
use super::free_grammar::ToolCallStarts;
use super::syntax_kind::{CallParser, SyntaxKind};
use super::tool_call_syntax::special_token;
use super::{ToolCallParserOptions, ToolCallSyntax, ToolDefinition};
use crate::harmony::{ASSISTANT, END, FUNCTIONS, MARKERS};
use crate::reasoning::ReasoningStart;
use crate::tokenizer::Tokenizer;
use grammar::UnconstrainedPreamble;
use grammar::lark_text::without;

/// Rule of the content type, and of the marker that ends the header.
const JSON_FORMAT: &str = "json_format";
/// Rule of the channel of a call.
const CALL_CHANNEL: &str = "call_channel";

/// Calls that are messages of the harmony format.
#[derive(Debug)]
pub(crate) struct HarmonyCallSyntax;

impl SyntaxKind for HarmonyCallSyntax {
    fn parser(&'static self, _options: ToolCallParserOptions<'_>) -> Option<Box<dyn CallParser>> {
        None
    }

    fn special_markers(&self) -> Vec<&'static str> {
        MARKERS.to_vec()
    }

    fn is_harmony(&self) -> bool {
        true
    }

    /// A call ends the output.
    fn allows_several(&self) -> bool {
        false
    }

    /// The recipient comes before or after the channel.
    fn call_text(&self, name: &str, writer: &CallGrammarWriter<'_>) -> CallWrapperText {
        let recipient = writer.text(&format!(" to={FUNCTIONS}{name}"));
        let infix =
            format!("({CALL_CHANNEL} {recipient} | {recipient} {CALL_CHANNEL}) {JSON_FORMAT}");
        CallWrapperText { head: String::new(), infix, tail: String::new() }
    }

    fn starts(
        &self,
        _tools: &[&ToolDefinition],
        _writer: &CallGrammarWriter<'_>,
    ) -> Option<ToolCallStarts> {
        None
    }
}

/// Part of an output in the harmony format to which a constraint applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HarmonyConstraintScope {
    /// The text of the answer, without its header.
    AnswerText,
    /// All messages after the reasoning, with their headers.
    Messages,
}

/// Returns the grammar of an output before its constrained part: the reasoning, and with
/// `HarmonyConstraintScope::AnswerText` the header of the answer. `None` = the output begins inside the
/// answer.
pub fn harmony_preamble(
    start: ReasoningStart,
    scope: HarmonyConstraintScope,
    tokenizer: &Tokenizer,
) -> Option<UnconstrainedPreamble> {
    let special = |marker: &str| special_token(marker, tokenizer);
    let mut writer = CallGrammarWriter::new(ToolCallSyntax::HARMONY, &special);
    let end = writer.text_up_to("REASONING", END, &other_markers());
    let rest = format!("{end} {}", writer.text(ASSISTANT));
    let reasoning = match start {
        ReasoningStart::After => return None,
        ReasoningStart::Inside => rest,
        ReasoningStart::AtMarker => {
            format!("({} {rest})?", writer.text("<|channel|>analysis<|message|>"))
        }
    };
    let header = match scope {
        HarmonyConstraintScope::Messages => String::new(),
        HarmonyConstraintScope::AnswerText => answer_header(&writer),
    };
    Some(UnconstrainedPreamble::Lark(format!("head: {reasoning} {header}\n{}", writer.rules)))
}

/// Returns the Lark expression of the header of the answer, with or without the content type JSON.
pub(super) fn answer_header(writer: &CallGrammarWriter<'_>) -> String {
    let [plain, constrained, json] = ["", " <|constrain|>json", " json"]
        .map(|format| writer.text(&format!("<|channel|>final{format}<|message|>")));
    format!("({plain} | {constrained} | {json})")
}

/// Adds the rules that the headers of all calls refer to.
pub(super) fn add_call_rules(writer: &mut CallGrammarWriter<'_>) {
    let [constrained, json] =
        [" <|constrain|>json<|message|>", " json<|message|>"].map(|format| writer.text(format));
    writer.rule(JSON_FORMAT, &format!("{constrained} | {json}"));
    let channel = writer.text("<|channel|>commentary");
    writer.rule(CALL_CHANNEL, &channel);
}

/// Adds the rules of free messages, and returns the right-hand side of the rule `start`: an optional
/// preamble, and then an answer or one of `calls`.
pub(super) fn free_messages(calls: &str, writer: &mut CallGrammarWriter<'_>) -> String {
    let preamble_end = writer.text_up_to("PREAMBLE", END, &other_markers());
    let preamble = writer.text("<|channel|>commentary<|message|>");
    let next = writer.text(ASSISTANT);
    writer.rule("preamble", &format!("{preamble} {preamble_end} {next}"));
    writer.rule("ANSWER", &without(&MARKERS.map(str::to_owned)));
    let header = answer_header(writer);
    format!("preamble? ({header} ANSWER | {calls})")
}

/// Returns the texts of all markers except the marker that ends a message.
fn other_markers() -> Vec<String> {
    let others = MARKERS.iter().filter(|marker| **marker != END);
    others.map(|marker| (*marker).to_owned()).collect()
}
