//! Where drawn tests begin: `HADRON_CURSOR` counts commits, so that each run of the gate draws what no earlier one has drawn and a run at
//! one commit can be repeated. Without it (`cargo test`) tests draw the same every time.

/// The number in `HADRON_CURSOR`, or 0.
#[allow(clippy::disallowed_methods, reason = "the gate says where drawn tests begin")]
pub(crate) fn cursor() -> u64 {
    std::env::var("HADRON_CURSOR").ok().map_or(0, |text| text.parse().expect("a number"))
}

/// First of `count` seeds that belong to this run: from `fixed` on without a cursor, above `fresh` with one.
pub(crate) fn first_seed(fixed: u64, fresh: u64, count: u64) -> u64 {
    match cursor() {
        0 => fixed,
        cursor => fresh + cursor * count,
    }
}
