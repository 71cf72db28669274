//! What kind of work a kernel does, by its name.

use super::DeviceSpan;
use super::spans::TraceScope;

/// Beginnings of names, and the family. A kernel without a row is a family of its own name's kind: `other`.
const FAMILIES: &[(&str, &str)] = &[
    ("attention_prefill", "attention prefill"),
    ("attention_decode", "attention decode"),
    ("attention_lone", "attention decode"),
    ("attention", "attention"),
    ("latent_gather", "attention prefill"),
    ("latent_prefill", "attention prefill"),
    ("latent_decode", "attention decode"),
    ("latent_groups", "attention decode"),
    ("latent_heads", "queries to latents, means to values"),
    ("latent_plain", "attention"),
    ("latent_write", "rotation and KV write"),
    ("embed", "embedding"),
    ("copy_rows", "embedding"),
    ("rms_norm", "norms"),
    ("add_rms_norm", "norms"),
    ("qk_", "rotation and KV write"),
    ("fp8_rows", "quantisation"),
    ("half_rows", "quantisation"),
    ("fp8", "products"),
    ("skinny", "products"),
    ("gemm", "products"),
    ("linear", "products"),
    ("library_product", "products"),
    ("cast_rows", "products"),
    ("moe", "experts"),
    ("place_experts", "experts"),
    ("sum_rows", "experts"),
    ("one_shot", "collectives"),
    ("elementwise", "elementwise"),
    ("silu", "elementwise"),
    ("add_rows", "elementwise"),
];

/// The family of a lap. Everything beside the layers is one of its own.
pub(super) fn family(lap: &DeviceSpan) -> &'static str {
    let Some(kernel) = lap.kernel.filter(|_| lap.scope == TraceScope::Forward) else {
        return lap.scope.name();
    };
    let known = FAMILIES.iter().find(|(beginning, _)| kernel.starts_with(beginning));
    known.map_or("other", |(_, family)| family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// But for those that are launched beside the layers.
    #[test]
    fn every_kernel_has_a_family() {
        let csrc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/csrc");
        let beside = ["draft_", "part_", "prepare_step", "sample_"];
        let mut kernels = 0;
        for folder in fs::read_dir(&csrc).unwrap().map(|entry| entry.unwrap().path()) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            let text = fs::read_to_string(folder.join(format!("{name}.hip"))).unwrap_or_default();
            let exported = text.split("EXPORT(").skip(1).filter_map(|rest| rest.split_once(')'));
            for (kernel, _) in exported {
                kernels += 1;
                let begins = |beginning: &str| kernel.starts_with(beginning);
                let known = FAMILIES.iter().any(|(beginning, _)| begins(beginning));
                assert!(known || beside.into_iter().any(begins), "{kernel} has no family");
            }
        }
        assert!(kernels > 50, "{kernels} kernels");
    }

    #[test]
    fn kernels_have_families_in_the_layers_only() {
        let of = |scope, kernel| family(&DeviceSpan { scope, kernel });
        assert_eq!(of(TraceScope::Forward, Some("skinny")), "products");
        assert_eq!(of(TraceScope::LmHead, Some("skinny")), "head");
        assert_eq!(of(TraceScope::Forward, Some("attention_prefill")), "attention prefill");
        assert_eq!(of(TraceScope::Forward, Some("attention_decode")), "attention decode");
        assert_eq!(of(TraceScope::Forward, Some("moe_tile")), "experts");
        assert_eq!(of(TraceScope::Forward, Some("novelty")), "other");
        assert_eq!(of(TraceScope::Forward, None), "forward");
    }
}
