//! Maps kernel names to the kernel families that traces show.

use super::DeviceSpan;
use super::spans::TraceScope;

/// Kernel name prefixes and their families; the first matching prefix applies. Other kernels are in family
/// `other`.
const FAMILIES: &[(&str, &str)] = &[
    ("attention_prefill", "attention prefill"),
    ("attention_decode", "attention decode"),
    ("attention_single_row", "attention decode"),
    ("attention", "attention"),
    ("mla_gather_kv", "attention prefill"),
    ("mla_prefill", "attention prefill"),
    ("mla_decode", "attention decode"),
    ("mla_head_gemm", "MLA W_UK and W_UV"),
    ("gdn", "gated delta net"),
    ("mla_plain", "attention"),
    ("mla_kv_write", "RoPE and KV write"),
    ("embed", "embedding"),
    ("copy_rows", "embedding"),
    ("rms_norm", "norms"),
    ("value_head_norm", "norms"),
    ("add_rms_norm", "norms"),
    ("qk_", "RoPE and KV write"),
    ("fp8_quantize_rows", "quantisation"),
    ("scale_rows_to_f16", "quantisation"),
    ("fp8", "linear layers"),
    ("gemm", "linear layers"),
    ("linear", "linear layers"),
    ("blaslt_gemm", "linear layers"),
    ("cast_rows", "linear layers"),
    ("moe", "experts"),
    ("eplb_map_experts", "experts"),
    ("one_shot_all_reduce", "collectives"),
    ("elementwise", "elementwise"),
    ("gated_activation", "elementwise"),
    ("gated_product_rows", "elementwise"),
    ("add_rows", "elementwise"),
];

/// Returns the kernel family of a span (the time of one kernel). For spans outside the model layers, the
/// family is the name of the span's scope, such as sampling.
pub(super) fn family(span: &DeviceSpan) -> &'static str {
    let Some(kernel) = span.kernel.filter(|_| span.scope == TraceScope::Forward) else {
        return span.scope.name();
    };
    let entry = FAMILIES.iter().find(|(prefix, _)| kernel.starts_with(prefix));
    entry.map_or("other", |(_, family)| family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Checks that every kernel has a family. Kernels that run only outside the layers need no entry in
    /// `FAMILIES`.
    #[test]
    fn every_kernel_has_a_family() {
        let csrc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/csrc");
        let outside_layers = [
            "draft_",
            "gather_draft_inputs",
            "insert_drafts",
            "map_draft_ids",
            "pool_",
            "prepare_",
            "sample_",
            "store_draft_states",
            "vocab_shard_",
        ];
        let mut kernels = 0;
        for folder in fs::read_dir(&csrc).unwrap().map(|entry| entry.unwrap().path()) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            let text = fs::read_to_string(folder.join(format!("{name}.hip"))).unwrap_or_default();
            let exported = text.split("EXPORT(").skip(1).filter_map(|rest| rest.split_once(')'));
            for (kernel, _) in exported {
                kernels += 1;
                let begins = |prefix: &str| kernel.starts_with(prefix);
                let has_family = FAMILIES.iter().any(|(prefix, _)| begins(prefix));
                assert!(
                    has_family || outside_layers.into_iter().any(begins),
                    "{kernel} has no family"
                );
            }
        }
        assert!(kernels > 50, "{kernels} kernels");
    }

    #[test]
    fn only_layer_kernels_have_families() {
        let of = |scope, kernel| family(&DeviceSpan { scope, kernel });
        assert_eq!(of(TraceScope::Forward, Some("gemm_small_m")), "linear layers");
        assert_eq!(of(TraceScope::LmHead, Some("gemm_small_m")), "head");
        assert_eq!(of(TraceScope::Forward, Some("attention_prefill")), "attention prefill");
        assert_eq!(of(TraceScope::Forward, Some("attention_decode")), "attention decode");
        assert_eq!(of(TraceScope::Forward, Some("moe_grouped_gemm")), "experts");
        assert_eq!(of(TraceScope::Forward, Some("novelty")), "other");
        assert_eq!(of(TraceScope::Forward, None), "forward");
    }
}
