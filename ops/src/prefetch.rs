//! Weight prefetch: a fused linear layer prefetches the weights of the next fused linear layer, which is
//! recorded from the order of launches.
//!
//! The first pass that launches two fused layers in sequence records the pair; later passes prefetch. Unfused
//! layers and other ops that read weights or the KV cache interrupt the sequence, so that no pair is recorded
//! across them: large prefills, which run first, launch some layers unfused that decode steps fuse. Results
//! never depend on what is recorded.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use kernels::{PackedMatrix, PrefetchHint};

use crate::PackedLinear;

/// Successor of a fused linear layer in launch order; the fused linear layer prefetches the successor's
/// weights. The field `gated` states whether a gate activation is fused with
/// the successor.
#[derive(Debug)]
pub(crate) struct NextLinearLayer {
    /// Weak reference, because the chain of layers is a cycle: the first layer follows the last one.
    weight: Weak<PackedMatrix>,
    gated: bool,
}

/// Tracks the order of fused launches: stores the fused linear layer that was launched last, if no other op
/// was launched after it.
#[derive(Debug, Default)]
pub(crate) struct FusedLaunchTracker {
    last: Mutex<Option<Arc<OnceLock<NextLinearLayer>>>>,
}

/// Weights of the next fused linear layer, which are prefetched.
#[derive(Debug)]
pub(crate) struct PrefetchTarget {
    weight: Arc<PackedMatrix>,
    gated: bool,
}

impl FusedLaunchTracker {
    /// Records the launch of the fused linear layer `w`, with a gate activation
    /// or not. Returns the weights of the
    /// fused layer that followed it in an earlier pass, for the launch to prefetch; `None` = none was
    /// recorded.
    pub(crate) fn launch(&self, w: &PackedLinear, gated: bool) -> Option<PrefetchTarget> {
        if let Some(last) = self.replace(Some(Arc::clone(&w.next))) {
            last.get_or_init(|| NextLinearLayer { weight: Arc::downgrade(&w.weight), gated });
        }
        let next = w.next.get()?;
        Some(PrefetchTarget { weight: next.weight.upgrade()?, gated: next.gated })
    }

    /// Records that an unfused linear layer or another op was launched, so that the next fused layer does not
    /// count as the successor of the last one.
    pub(crate) fn interrupt(&self) {
        self.replace(None);
    }

    fn replace(
        &self,
        with: Option<Arc<OnceLock<NextLinearLayer>>>,
    ) -> Option<Arc<OnceLock<NextLinearLayer>>> {
        std::mem::replace(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner), with)
    }
}

impl PrefetchTarget {
    pub(crate) fn hint(&self) -> PrefetchHint<'_> {
        PrefetchHint { weight: &self.weight, gated: self.gated }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, HostMat, Ops};
    use kernels::cpu::CpuBackend;

    fn cpu_ops() -> Ops {
        let cpu = CpuBackend::new(device::CpuConfig { threads: 1, ..Default::default() }).unwrap();
        Ops::new(cpu.into(), DType::F32).unwrap()
    }

    fn layers<const N: usize>() -> [PackedLinear; N] {
        let ops = cpu_ops();
        let bytes = [0u8; 16];
        let part = HostMat::new(&bytes, DType::F32, 2, 2).unwrap();
        std::array::from_fn(|_| ops.pack_linear(&[part], None).unwrap())
    }

    #[test]
    fn second_pass_prefetches_the_next_layer() {
        let ([a, b, c], order) = (layers(), FusedLaunchTracker::default());
        let pass = || {
            let first = order.launch(&a, false);
            let second = order.launch(&b, true);
            order.interrupt();
            [first, second, order.launch(&c, false)]
        };
        assert!(pass().iter().all(Option::is_none));
        let [first, second, third] = pass();
        let first = first.unwrap();
        assert!(Arc::ptr_eq(&first.weight, &b.weight) && first.gated);
        assert!(second.is_none(), "another op was launched in between");
        assert!(
            Arc::ptr_eq(&third.unwrap().weight, &a.weight),
            "the next pass starts with layer a"
        );
    }

    #[test]
    fn unfused_first_pass_records_no_pair() {
        let ([gate_up, down], ops) = (layers(), cpu_ops());
        let x = ops.floats(&[0.0; 4], DType::F32, &[2, 2]).unwrap();
        for w in [&gate_up, &down] {
            ops.linear(&x, w).unwrap();
        }
        let order = &ops.launch_order;
        let decode = || [order.launch(&gate_up, true), order.launch(&down, false)];
        assert!(decode().iter().all(Option::is_none), "the first fused pass records pairs");
        let [first, second] = decode();
        assert!(Arc::ptr_eq(&first.unwrap().weight, &down.weight));
        let second = second.unwrap();
        assert!(Arc::ptr_eq(&second.weight, &gate_up.weight) && second.gated);
    }

    #[test]
    fn dropped_weights_are_not_prefetched() {
        let ([a, b], order) = (layers(), FusedLaunchTracker::default());
        order.launch(&a, false);
        order.launch(&b, false);
        drop(b);
        order.interrupt();
        assert!(order.launch(&a, false).is_none());
    }
}
