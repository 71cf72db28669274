//! Reasoning before the constrained part of an output.

use grammar::{HeadEnd, UnconstrainedHead};
use text::{ReasoningFamily, ReasoningMarkers, Tokenizer};

/// Returns the reasoning before a constrained part. Where the tokenizer has a token for a marker, this token ends
/// the reasoning.
pub(super) fn reasoning_head(tokenizer: &Tokenizer, family: ReasoningFamily) -> UnconstrainedHead {
    let end = |markers: &ReasoningMarkers| HeadEnd {
        text: markers.close.to_owned(),
        token: tokenizer.added_token_id(markers.close),
    };
    let opening = tokenizer.added_token_id(family.markers().open);
    UnconstrainedHead {
        opening: opening.filter(|&id| tokenizer.is_special(id)),
        ends: family.all_markers().iter().map(end).collect(),
    }
}
