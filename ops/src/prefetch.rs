//! Weight prefetch: a fused linear layer prefetches weights of the next linear layer, which is recorded from the
//! order of launches.
//!
//! The first pass that launches two layers in sequence records the pair; later passes prefetch. Other ops
//! that read weights or the KV cache interrupt the sequence. Results never depend on what is recorded.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use kernels::{PackedMatrix, PrefetchHint};

use crate::PackedLinear;

/// The linear layer that is launched after another one.
#[derive(Debug)]
pub(crate) struct NextLinear {
    /// Weak, because the chain of layers is a cycle: the first layer follows the last one.
    weight: Weak<PackedMatrix>,
    silu_mul: bool,
}

/// The linear layer that was launched last, if no other op came after it.
#[derive(Debug, Default)]
pub(crate) struct LaunchOrder {
    last: Mutex<Option<Arc<OnceLock<NextLinear>>>>,
}

/// Weights to prefetch.
#[derive(Debug)]
pub(crate) struct NextWeights {
    weight: Arc<PackedMatrix>,
    silu_mul: bool,
}

impl LaunchOrder {
    /// Records the launch of `w`, with `silu_mul` fused or not. Returns the weights of the next launch, if it
    /// is recorded.
    pub(crate) fn launch(&self, w: &PackedLinear, silu_mul: bool) -> Option<NextWeights> {
        if let Some(last) = self.replace(Some(Arc::clone(&w.next))) {
            last.get_or_init(|| NextLinear { weight: Arc::downgrade(&w.weight), silu_mul });
        }
        let next = w.next.get()?;
        Some(NextWeights { weight: next.weight.upgrade()?, silu_mul: next.silu_mul })
    }

    /// Records an op that is not a linear layer.
    pub(crate) fn interrupt(&self) {
        self.replace(None);
    }

    fn replace(
        &self,
        with: Option<Arc<OnceLock<NextLinear>>>,
    ) -> Option<Arc<OnceLock<NextLinear>>> {
        std::mem::replace(&mut *self.last.lock().unwrap_or_else(PoisonError::into_inner), with)
    }
}

impl NextWeights {
    pub(crate) fn hint(&self) -> PrefetchHint<'_> {
        PrefetchHint { weight: &self.weight, silu_mul: self.silu_mul }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, HostMat, Ops};
    use kernels::cpu::CpuBackend;

    fn layers<const N: usize>() -> [PackedLinear; N] {
        let cpu = CpuBackend::new(device::CpuConfig { threads: 1, ..Default::default() }).unwrap();
        let ops = Ops::new(cpu.into(), DType::F32).unwrap();
        let bytes = [0u8; 16];
        let part = HostMat::new(&bytes, DType::F32, 2, 2).unwrap();
        std::array::from_fn(|_| ops.pack_linear(&[part], None).unwrap())
    }

    #[test]
    fn second_pass_prefetches_the_next_layer() {
        let ([a, b, c], order) = (layers(), LaunchOrder::default());
        let pass = || {
            let first = order.launch(&a, false);
            let second = order.launch(&b, true);
            order.interrupt();
            [first, second, order.launch(&c, false)]
        };
        assert!(pass().iter().all(Option::is_none));
        let [first, second, third] = pass();
        let first = first.unwrap();
        assert!(Arc::ptr_eq(&first.weight, &b.weight) && first.silu_mul);
        assert!(second.is_none(), "another op came after it");
        assert!(Arc::ptr_eq(&third.unwrap().weight, &a.weight), "the next pass begins with it");
    }

    #[test]
    fn dropped_weights_are_not_prefetched() {
        let ([a, b], order) = (layers(), LaunchOrder::default());
        order.launch(&a, false);
        order.launch(&b, false);
        drop(b);
        order.interrupt();
        assert!(order.launch(&a, false).is_none());
    }
}
