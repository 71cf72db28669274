//! What kind of work a kernel does, by its name.

use super::Lap;
use super::laps::Scope;

/// Beginnings of names, and the family. A kernel without a row is a family of its own name's kind: `other`.
const FAMILIES: &[(&str, &str)] = &[
    ("attention_prefill", "attention prefill"),
    ("attention_decode", "attention decode"),
    ("attention_lone", "attention decode"),
    ("attention", "attention"),
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
    ("silu", "elementwise"),
    ("add_rows", "elementwise"),
];

/// The family of a lap. Everything beside the layers is one of its own.
pub(super) fn family(lap: &Lap) -> &'static str {
    let Some(kernel) = lap.kernel.filter(|_| lap.scope == Scope::Forward) else {
        return lap.scope.name();
    };
    let known = FAMILIES.iter().find(|(beginning, _)| kernel.starts_with(beginning));
    known.map_or("other", |(_, family)| family)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_families_in_the_layers_only() {
        let of = |scope, kernel| family(&Lap { scope, kernel });
        assert_eq!(of(Scope::Forward, Some("skinny")), "products");
        assert_eq!(of(Scope::Head, Some("skinny")), "head");
        assert_eq!(of(Scope::Forward, Some("attention_prefill")), "attention prefill");
        assert_eq!(of(Scope::Forward, Some("attention_decode")), "attention decode");
        assert_eq!(of(Scope::Forward, Some("moe_tile")), "experts");
        assert_eq!(of(Scope::Forward, Some("novelty")), "other");
        assert_eq!(of(Scope::Forward, None), "forward");
    }
}
