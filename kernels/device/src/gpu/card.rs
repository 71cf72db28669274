//! Properties of GPU models that no driver call returns.

/// GPU model with the properties that no driver call returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProductSpec {
    /// Model name, as contained in product names such as `AMD Instinct MI300X VF`.
    pub name: &'static str,
    /// Number of compute units of the whole GPU. A partition of the GPU has fewer.
    pub compute_units: u32,
    /// Whether the GPU and the host CPU share the same memory.
    pub has_unified_memory: bool,
}

/// AMD Instinct GPU models for which kernels are compiled.
const CARDS: &[GpuProductSpec] = &[
    GpuProductSpec { name: "MI300X", compute_units: 304, has_unified_memory: false },
    GpuProductSpec { name: "MI300A", compute_units: 228, has_unified_memory: true },
    GpuProductSpec { name: "MI325X", compute_units: 304, has_unified_memory: false },
    GpuProductSpec { name: "MI350X", compute_units: 256, has_unified_memory: false },
    GpuProductSpec { name: "MI355X", compute_units: 256, has_unified_memory: false },
];

/// Size in bytes of the memory-side cache (Infinity Cache) of all CDNA 3 and CDNA 4 GPUs.
const INFINITY_CACHE_BYTES: u64 = 256 << 20;

impl GpuProductSpec {
    /// Returns the GPU model with the product name `name`; `None` if the model is not in the table.
    #[must_use]
    pub fn of_name(name: &str) -> Option<&'static Self> {
        CARDS.iter().find(|card| name.contains(card.name))
    }
}

/// Returns the size in bytes of the last-level cache. AMD drivers only report the L2 cache of one XCD, but
/// the last-level cache is the Infinity Cache. On NVIDIA GPUs the last-level cache is L2.
pub(super) fn last_level_cache_bytes(arch: &str, l2_bytes: u32) -> u64 {
    match arch {
        "gfx942" | "gfx950" => INFINITY_CACHE_BYTES,
        _ => u64::from(l2_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_by_product_name() {
        for (name, expected) in [
            ("AMD Instinct MI300X", Some(("MI300X", 304))),
            ("AMD Instinct MI300X VF", Some(("MI300X", 304))),
            ("AMD Instinct MI300A", Some(("MI300A", 228))),
            ("AMD Instinct MI325X", Some(("MI325X", 304))),
            ("AMD Instinct MI350X", Some(("MI350X", 256))),
            ("AMD Instinct MI355X", Some(("MI355X", 256))),
            ("AMD Instinct MI250X", None),
            ("NVIDIA H200", None),
            ("", None),
        ] {
            let found = GpuProductSpec::of_name(name);
            assert_eq!(found.map(|card| (card.name, card.compute_units)), expected, "{name}");
            let is_unified = found.is_some_and(|card| card.has_unified_memory);
            assert_eq!(is_unified, name.ends_with("MI300A"), "{name}");
        }
    }

    #[test]
    fn last_level_cache_includes_the_infinity_cache() {
        assert_eq!(last_level_cache_bytes("gfx942", 4 << 20), 256 << 20);
        assert_eq!(last_level_cache_bytes("gfx950", 4 << 20), 256 << 20);
        assert_eq!(last_level_cache_bytes("sm_90a", 50 << 20), 50 << 20);
        assert_eq!(last_level_cache_bytes("gfx90a", 8 << 20), 8 << 20);
    }
}
