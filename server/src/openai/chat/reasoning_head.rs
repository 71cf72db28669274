//! Describes the unconstrained reasoning before the constrained part of an output.

use grammar::{PreambleEndMarker, UnconstrainedPreamble};
use text::{ReasoningFamily, ReasoningMarkers, Tokenizer};

/// Returns the description of the reasoning before the constrained part. If the tokenizer has a token for an
/// end marker, that token ends the reasoning.
pub(super) fn reasoning_head(
    tokenizer: &Tokenizer,
    family: ReasoningFamily,
) -> UnconstrainedPreamble {
    let end = |markers: &ReasoningMarkers| PreambleEndMarker {
        text: markers.close.to_owned(),
        token: tokenizer.added_token_id(markers.close),
    };
    let opening = tokenizer.added_token_id(family.markers().open);
    UnconstrainedPreamble {
        opening: opening.filter(|&id| tokenizer.is_special(id)),
        ends: family.all_markers().iter().map(end).collect(),
    }
}
