//! Checks of the fields that describe the KV cache scales. The scales are used with an FP8 KV cache
//! (`--kv-cache-dtype fp8`) and ignored with KV caches of higher precision.

use super::super::ModelConfigError;
use super::super::json_fields::JsonFields;
use super::compressed_tensors::check_float8;
use super::expect_text;
use serde_json::Value;

/// Rejects every value of the field `kv_cache_scheme` except FP8 with static scales, which are stored in the
/// checkpoint. The value is the string `static` or an object.
pub(super) fn check_kv_cache_scheme(fields: &JsonFields) -> Result<(), ModelConfigError> {
    const FIELD: &str = "kv_cache_scheme";
    if let Some(Value::String(_)) = fields.value(FIELD) {
        return expect_text(fields, FIELD, &["static"]);
    }
    let Some(scheme) = fields.object(FIELD)? else { return Ok(()) };
    check_float8(&scheme)?;
    if scheme.flag("dynamic", false)? {
        return Err(scheme.unsupported("dynamic", "only stored scales are"));
    }
    expect_text(&scheme, "strategy", &["tensor", "attn_head"])
}
