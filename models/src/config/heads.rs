//! Parser of the attention heads: number of query heads, number of KV heads, and channels per head.

use super::json_fields::JsonFields;
use super::parse_config::WIDTH_LIMIT;
use super::{MlaConfig, ModelArchitecture, ModelConfigError};

/// The number of channels per head must be a multiple of this number.
const HEAD_UNIT: usize = 16;
const KV_HEADS: &str = "num_key_value_heads";
const HEAD_DIM: &str = "head_dim";

/// Attention heads of a layer, over all ranks.
pub(super) struct HeadCounts {
    /// Number of query heads.
    pub(super) query: usize,
    /// Number of KV heads.
    pub(super) key_value: usize,
    /// Number of channels of a head's query and of its key.
    pub(super) dim: usize,
}

/// Reads the heads of grouped-query attention.
pub(super) fn gqa_heads(
    fields: &JsonFields,
    architecture: ModelArchitecture,
    hidden: usize,
) -> Result<HeadCounts, ModelConfigError> {
    let query = fields.size("num_attention_heads", WIDTH_LIMIT)?;
    let absent = architecture.traits().kv_heads_default.filter(|_| !fields.is_null(KV_HEADS));
    let key_value = fields.size_or_none(KV_HEADS, WIDTH_LIMIT)?.or(absent).unwrap_or(query);
    if !query.is_multiple_of(key_value) {
        let detail = format!("{key_value} does not divide num_attention_heads {query}");
        return Err(fields.contradiction(KV_HEADS, detail));
    }
    let absent = absent_head_dim(fields, architecture).filter(|_| !fields.is_null(HEAD_DIM));
    let dim = fields.size_or_none(HEAD_DIM, WIDTH_LIMIT)?.or(absent);
    if dim.is_none() && !hidden.is_multiple_of(query) {
        let detail =
            format!("{query} does not divide hidden_size {hidden}, and head_dim is absent");
        return Err(fields.contradiction("num_attention_heads", detail));
    }
    let dim = dim.unwrap_or(hidden / query);
    if !dim.is_multiple_of(HEAD_UNIT) {
        let detail = format!("{dim} channels per head; kernels need a multiple of {HEAD_UNIT}");
        return Err(fields.contradiction(HEAD_DIM, detail));
    }
    Ok(HeadCounts { query, key_value, dim })
}

/// Number of channels per head of configurations without the field `head_dim` (transformers
/// `configuration_*.py`); `None` = the hidden size divided by the number of query heads. A field with the
/// value null also means this quotient.
fn absent_head_dim(fields: &JsonFields, architecture: ModelArchitecture) -> Option<usize> {
    architecture.text_traits(fields).head_dim_default
}

/// Reads the heads of MLA, where every query head has its own key and value.
pub(super) fn mla_heads(
    fields: &JsonFields,
    mla: &MlaConfig,
) -> Result<HeadCounts, ModelConfigError> {
    let query = fields.size("num_attention_heads", WIDTH_LIMIT)?;
    let key_value = fields.size_or_none(KV_HEADS, WIDTH_LIMIT)?.unwrap_or(query);
    if key_value != query {
        let detail =
            format!("{key_value} KV heads for {query} query heads; MLA has one per query head");
        return Err(fields.contradiction(KV_HEADS, detail));
    }
    Ok(HeadCounts { query, key_value, dim: mla.qk_nope_head_dim + mla.qk_rope_head_dim })
}
