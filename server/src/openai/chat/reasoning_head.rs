//! Describes the part of an output before its constrained part: the reasoning, and in the harmony format the
//! header of the answer.

use grammar::{PreambleEndMarker, UnconstrainedPreamble};
use text::{
    HarmonyConstraintScope, ReasoningFamily, ReasoningMarkers, ReasoningStart, Tokenizer,
    harmony_preamble,
};

/// Returns the part of an output before its constrained part, for an output that begins in the state `start`;
/// `None` = the whole output is constrained. `scope` is what the constraint applies to in the harmony format.
/// In other formats, an output that begins at the opening marker has reasoning if `opens_reasoning`.
pub(super) fn constraint_preamble(
    tokenizer: &Tokenizer,
    family: ReasoningFamily,
    start: ReasoningStart,
    opens_reasoning: bool,
    scope: HarmonyConstraintScope,
) -> Option<UnconstrainedPreamble> {
    if family.is_harmony() {
        return harmony_preamble(start, scope, tokenizer);
    }
    let has_reasoning = match start {
        ReasoningStart::Inside => true,
        ReasoningStart::AtMarker => opens_reasoning,
        ReasoningStart::After => false,
    };
    has_reasoning.then(|| reasoning_head(tokenizer, family))
}

/// Returns the description of reasoning between two markers. If the tokenizer has a token for an end marker,
/// that token ends the reasoning.
fn reasoning_head(tokenizer: &Tokenizer, family: ReasoningFamily) -> UnconstrainedPreamble {
    let end = |markers: &ReasoningMarkers| PreambleEndMarker {
        text: markers.close.to_owned(),
        token: tokenizer.added_token_id(markers.close),
    };
    let opening = tokenizer.added_token_id(family.markers().open);
    UnconstrainedPreamble::UpToMarker {
        opening: opening.filter(|&id| tokenizer.is_special(id)),
        ends: family.all_markers().iter().map(end).collect(),
    }
}
