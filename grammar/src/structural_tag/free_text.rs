//! Converts the formats of structural tags that contain free text to Lark.

use super::fields::FormatFields;
use super::formats::TagGrammarWriter;
use super::{EndTexts, LarkExpression, StructuralTagError};
use crate::lark_text::{ANY, SOME, literal, one_of, up_to, without};
use serde_json::Value;

/// Writes a format of type `any_text`: free text that contains none of the texts `excludes`, up to one of
/// the texts `ends`.
pub(super) fn any_text(
    fields: &mut FormatFields<'_>,
    ends: &EndTexts,
) -> Result<LarkExpression, StructuralTagError> {
    let excluded = fields.texts("excludes")?;
    for name in ["max_tokens", "max_chars"] {
        fields.reject(name, Value::is_null)?;
    }
    Ok(LarkExpression::Terminal(free_text(&excluded, ends)))
}

impl TagGrammarWriter {
    /// Writes free text in which each trigger text must continue as one of the constrained parts of this
    /// trigger.
    pub(super) fn dispatch(
        &mut self,
        TriggeredText { branches, excluded, is_first_free, is_single }: TriggeredText,
        ends: &EndTexts,
    ) -> LarkExpression {
        let triggers = branches.iter().map(|one| &one.trigger);
        let stops: Vec<String> = triggers.chain(&excluded).chain(ends).cloned().collect();
        // All free-text terminals refer to one shared terminal for the texts that end free text, because it
        // may be long.
        let stop = self.terminal(&one_of(&stops));
        let free = self.terminal(&format!("{ANY} & ~({ANY} {stop} {ANY})"));
        let earlier = self.terminal(&format!("~({ANY} {stop} {SOME})"));
        let ended = |end: &str| format!("{free} {end} & {earlier}");
        let end = if ends.is_empty() { String::new() } else { one_of(ends) };
        let tail = if ends.is_empty() { free.clone() } else { self.terminal(&ended(&end)) };
        let mut chunks = Vec::new();
        for TriggerBranch { trigger, rests } in &branches {
            let head = self.terminal(&ended(&literal(trigger)));
            chunks.push(format!("{head} ({})", rests.join(" | ")));
        }
        let chunk = self.rule(&chunks.join(" | "));
        let whole: Vec<String> = branches.iter().flat_map(TriggerBranch::wholes).collect();
        let first = whole.join(" | ");
        LarkExpression::Rule(match (is_first_free, is_single) {
            (true, false) => format!("{chunk}* {tail}"),
            (true, true) => format!("({tail} | {chunk} {end})"),
            (false, false) => format!("({first}) {chunk}* {tail}"),
            (false, true) => format!("({first}) {end}"),
        })
    }
}

/// Free text in which triggers start constrained parts.
pub(super) struct TriggeredText {
    pub(super) branches: Vec<TriggerBranch>,
    /// Texts that must not occur in the free text.
    pub(super) excluded: Vec<String>,
    /// Whether free text may precede the first constrained part.
    pub(super) is_first_free: bool,
    /// Whether at most one constrained part is allowed, after which no free text follows.
    pub(super) is_single: bool,
}

/// Constrained parts that begin with the same trigger text.
pub(super) struct TriggerBranch {
    pub(super) trigger: String,
    /// Constrained parts without the trigger at their start, each as the right-hand side of a Lark rule.
    pub(super) rests: Vec<String>,
}

impl TriggerBranch {
    /// Returns the constrained parts including the trigger at their start.
    fn wholes(&self) -> impl Iterator<Item = String> {
        let trigger = literal(&self.trigger);
        self.rests.iter().map(move |rest| format!("{trigger} {rest}"))
    }
}

/// Returns the terminal for free text up to one of `ends`.
fn free_text(excluded: &[String], ends: &EndTexts) -> String {
    // A text in `ends` needs no exclusion, because the free text ends at its first occurrence.
    let excluded: Vec<String> =
        excluded.iter().filter(|text| !ends.contains(text)).cloned().collect();
    if ends.is_empty() { without(&excluded) } else { up_to(ends, &excluded) }
}
