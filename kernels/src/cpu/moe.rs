//! Mixture of experts: routing, and the expert MLPs over tokens grouped by expert.

use super::device::{CpuDevice, check_dtype, check_size, for_float};
use super::maths::exp;
use crate::dtype::Float;
use crate::{DType, DeviceError, Driver, Experts, Mat, MatMut, Routes};

impl CpuDevice {
    pub(super) fn route_softmax(
        &self,
        mut experts: MatMut<'_>,
        mut weights: MatMut<'_>,
        logits: Mat<'_>,
        normalise: bool,
    ) -> Result<(), DeviceError> {
        const KERNEL: &str = "moe_route_softmax";
        check_dtype(KERNEL, "logits", logits.dtype(), DType::F32)?;
        check_dtype(KERNEL, "experts", experts.dtype(), DType::I32)?;
        check_dtype(KERNEL, "weights", weights.dtype(), DType::F32)?;
        let k = experts.cols();
        check_size(KERNEL, "rows of experts", experts.rows(), logits.rows())?;
        check_size(KERNEL, "rows of weights", weights.rows(), logits.rows())?;
        check_size(KERNEL, "columns of weights", weights.cols(), k)?;
        check_size(KERNEL, "choices", k.min(logits.cols()), k)?;
        let mut scores = vec![0.0; logits.cols()];
        for t in 0..logits.rows() {
            softmax(&mut scores, logits.row(t));
            let (chosen, weight) = (experts.row_mut::<i32>(t), weights.row_mut::<f32>(t));
            for (e, w) in chosen.iter_mut().zip(weight.iter_mut()) {
                let best = first_largest(&scores);
                (*e, *w) = (best as i32, scores[best]);
                scores[best] = f32::NEG_INFINITY; // Taken.
            }
            if normalise {
                let sum: f32 = weight.iter().sum();
                for w in weight {
                    *w /= sum;
                }
            }
        }
        Ok(())
    }

    pub(super) fn expert_mlp(
        &self,
        mut y: MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        check_mlp(&y, x, routes, experts)?;
        for_float!(MLP, x.dtype(), T => self.expert_mlp_of::<T>(&mut y, x, routes, experts)?);
        Ok(())
    }

    fn expert_mlp_of<T: Float>(
        &self,
        y: &mut MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        let (tokens, hidden) = (x.rows(), x.cols());
        let most = Grouped::new(routes, experts);
        let widest = most.groups.iter().map(Vec::len).max().unwrap_or(0);
        let inner = experts.down.first().map_or(0, crate::Packed::k);
        let elements = |n: usize| n.max(1) * T::DTYPE.bytes();
        let mut rows = self.alloc(elements(widest * hidden))?;
        let mut gate_up = self.alloc(elements(widest * 2 * inner))?;
        let mut act = self.alloc(elements(widest * inner))?;
        let mut out = self.alloc(widest.max(1) * hidden * 4)?;
        let mut sums = vec![0.0f32; tokens * hidden];
        // Ascending experts: each token's sum has one order, whatever its neighbours chose.
        for (e, group) in most.groups.iter().enumerate().filter(|(_, group)| !group.is_empty()) {
            let n = group.len();
            let mut gathered = rows.mat_mut(T::DTYPE, n, hidden)?;
            for (i, &(t, _)) in group.iter().enumerate() {
                gathered.row_mut::<T>(i).copy_from_slice(x.row(t));
            }
            let both = gate_up.mat_mut(T::DTYPE, n, 2 * inner)?;
            self.linear_rows(both, gathered.as_ref(), &experts.gate_up[e], None)?;
            let both = gate_up.mat(T::DTYPE, n, 2 * inner)?;
            self.silu_mul_rows(act.mat_mut(T::DTYPE, n, inner)?, both)?;
            let mut down = out.mat_mut(DType::F32, n, hidden)?;
            self.linear_rows(
                down.reborrow(),
                act.mat(T::DTYPE, n, inner)?,
                &experts.down[e],
                None,
            )?;
            for (i, &(t, weight)) in group.iter().enumerate() {
                let sum = &mut sums[t * hidden..][..hidden];
                for (s, v) in sum.iter_mut().zip(down.as_ref().row::<f32>(i)) {
                    *s += weight * v;
                }
            }
        }
        for t in 0..tokens {
            for (y, s) in y.row_mut::<T>(t).iter_mut().zip(&sums[t * hidden..]) {
                *y = T::store(*s);
            }
        }
        Ok(())
    }
}

const MLP: &str = "moe_mlp";

/// Tokens and weights by local expert, tokens ascending.
struct Grouped {
    groups: Vec<Vec<(usize, f32)>>,
}

impl Grouped {
    fn new(routes: &Routes<'_>, experts: &Experts<'_>) -> Self {
        let mut groups = vec![Vec::new(); experts.gate_up.len()];
        for t in 0..routes.experts.rows() {
            let chosen = routes.experts.row::<i32>(t).iter().zip(routes.weights.row::<f32>(t));
            for (&e, &weight) in chosen {
                let local = usize::try_from(e).ok().and_then(|e| e.checked_sub(experts.first));
                if let Some(group) = local.and_then(|e| groups.get_mut(e)) {
                    group.push((t, weight));
                }
            }
        }
        Self { groups }
    }
}

fn check_mlp(
    y: &MatMut<'_>,
    x: Mat<'_>,
    routes: &Routes<'_>,
    experts: &Experts<'_>,
) -> Result<(), DeviceError> {
    check_size(MLP, "rows", y.rows(), x.rows())?;
    check_size(MLP, "columns", y.cols(), x.cols())?;
    check_dtype(MLP, "output", y.dtype(), x.dtype())?;
    check_size(MLP, "rows of experts", routes.experts.rows(), x.rows())?;
    check_size(MLP, "rows of weights", routes.weights.rows(), x.rows())?;
    check_size(MLP, "choices", routes.weights.cols(), routes.experts.cols())?;
    check_dtype(MLP, "experts", routes.experts.dtype(), DType::I32)?;
    check_dtype(MLP, "weights", routes.weights.dtype(), DType::F32)?;
    check_size(MLP, "down projections", experts.down.len(), experts.gate_up.len())?;
    let inner = experts.down.first().map_or(0, crate::Packed::k);
    for (gate_up, down) in experts.gate_up.iter().zip(experts.down) {
        check_size(MLP, "inputs of gate_up", gate_up.k(), x.cols())?;
        check_size(MLP, "outputs of gate_up", gate_up.n(), 2 * inner)?;
        check_size(MLP, "inputs of down", down.k(), inner)?;
        check_size(MLP, "outputs of down", down.n(), x.cols())?;
    }
    Ok(())
}

fn softmax(scores: &mut [f32], logits: &[f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for (s, l) in scores.iter_mut().zip(logits) {
        *s = exp(l - max);
        sum += *s;
    }
    for s in scores {
        *s /= sum;
    }
}

/// Index of the largest score, the lowest among equals.
fn first_largest(scores: &[f32]) -> usize {
    let mut best = 0;
    for (i, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = i;
        }
    }
    best
}
