//! Expert MLPs of mixture-of-experts (MoE) layers on the CPU: tokens are grouped by expert, and each expert
//! runs as linear layers. Also the EPLB lookup of physical experts.

use std::sync::PoisonError;

use device::{
    Buffer, DType, DeviceDriver, DeviceError, FloatElement, MatMut, MatRef, check_dtype, check_size,
};

use super::backend::for_float;
use super::elementwise::min_rows;
use super::row_kernel::{RowKernel, dispatch};
use super::shared_rows::SharedRows;
use crate::check::check_expert_map;
use crate::cpu::CpuBackend;
use crate::{
    CpuKernel, ExpertMlp, ExpertPlacementLookup, ExpertWeights, GatedActivation, Linear, TopKRoutes,
};

impl CpuBackend {
    fn expert_mlp_of<T: FloatElement>(
        &self,
        y: &mut MatMut<'_>,
        x: MatRef<'_>,
        routes: &TopKRoutes<'_>,
        experts: &ExpertWeights<'_>,
    ) -> Result<(), DeviceError> {
        let (tokens, hidden) = (x.rows(), x.cols());
        let inner = experts.down.k();
        let grouped = TokensByExpert::new(routes, experts);
        let max_group_tokens = grouped.groups.iter().map(Vec::len).max().unwrap_or(0);
        let mut workspace = self.moe_workspace().lock().unwrap_or_else(PoisonError::into_inner);
        let [rows, gate_up, act, out, sums] = workspace.buffers(
            |bytes| self.alloc(bytes),
            [
                max_group_tokens * hidden * T::DTYPE.bytes(),
                max_group_tokens * 2 * inner * T::DTYPE.bytes(),
                max_group_tokens * inner * T::DTYPE.bytes(),
                max_group_tokens * hidden * 4,
                tokens * hidden * 4,
            ],
        )?;
        let mut sums = sums.mat_mut(DType::F32, tokens, hidden)?;
        for t in 0..tokens {
            sums.row_mut::<f32>(t).fill(0.0);
        }
        // Experts are processed in ascending order. The expert outputs of a token are therefore added in the
        // same order whatever experts the other tokens selected.
        for (e, group) in grouped.groups.iter().enumerate().filter(|(_, group)| !group.is_empty()) {
            let n = group.len();
            let mut rows = rows.mat_mut(T::DTYPE, n, hidden)?;
            self.gather_group::<T>(&mut rows, x, group);
            let mut gate_up = gate_up.mat_mut(T::DTYPE, n, 2 * inner)?;
            self.run(Linear {
                y: gate_up.reborrow(),
                x: rows.as_ref(),
                weight: experts.gate_up.get(e),
                bias: experts.gate_up_bias.map(|bias| bias.rows_from(e, 1)),
            })?;
            let mut act = act.mat_mut(T::DTYPE, n, inner)?;
            let activation = experts.activation;
            self.run(GatedActivation { y: act.reborrow(), x: gate_up.as_ref(), activation })?;
            let mut out = out.mat_mut(DType::F32, n, hidden)?;
            self.run(Linear {
                y: out.reborrow(),
                x: act.as_ref(),
                weight: experts.down.get(e),
                bias: experts.down_bias.map(|bias| bias.rows_from(e, 1)),
            })?;
            self.add_group(&mut sums, out.as_ref(), group);
        }
        for t in 0..tokens {
            for (y, s) in y.row_mut::<T>(t).iter_mut().zip(sums.as_ref().row::<f32>(t)) {
                *y = T::store(*s);
            }
        }
        Ok(())
    }

    fn gather_group<T: FloatElement>(
        &self,
        rows: &mut MatMut<'_>,
        x: MatRef<'_>,
        group: &[ExpertToken],
    ) {
        let out = SharedRows::<T>::new(rows);
        self.threads().split(group.len(), 1, min_rows(x.cols()), &|range| {
            for i in range {
                // SAFETY: each row belongs to one thread.
                unsafe { out.row(i) }.copy_from_slice(x.row(group[i].token));
            }
        });
    }

    /// Adds the outputs of one expert to the sums of its tokens: `sums[token] += weight · out[i]`. No token
    /// occurs twice in `group`.
    fn add_group(&self, sums: &mut MatMut<'_>, out: MatRef<'_>, group: &[ExpertToken]) {
        let (isa, sums) = (self.isa(), SharedRows::<f32>::new(sums));
        self.threads().split(group.len(), 1, min_rows(out.cols()), &|range| {
            for i in range {
                let ExpertToken { token, weight } = group[i];
                // SAFETY: the tokens of an expert are distinct, so each row of `sums` belongs to one thread.
                let sum = unsafe { sums.row(token) };
                dispatch(isa, WeightedAccumulation { sum, x: out.row(i), weight });
            }
        });
    }
}

impl CpuKernel for ExpertMlp<'_> {
    fn run(self, cpu: &CpuBackend) -> Result<(), DeviceError> {
        let Self { mut y, x, routes, experts } = self;
        check_mlp(&y, x, routes, experts)?;
        for_float!(MLP, x.dtype(), T => cpu.expert_mlp_of::<T>(&mut y, x, routes, experts)?);
        Ok(())
    }
}

impl CpuKernel for ExpertPlacementLookup<'_> {
    fn run(self, _cpu: &CpuBackend) -> Result<(), DeviceError> {
        const KERNEL: &str = "eplb_map_experts";
        let Self { mut experts, positions, tokens, placement } = self;
        check_expert_map(experts.as_ref(), positions, tokens, placement)?;
        for t in 0..experts.rows() {
            let token = tokens.map_or(t as i32, |tokens| tokens.row::<i32>(0)[t]);
            let position = usize::try_from(token).ok().and_then(|t| positions.row::<i32>(0).get(t));
            let Some(&position) = position else {
                let (index, limit) = (i64::from(token), positions.cols());
                return Err(DeviceError::Index { kernel: KERNEL, what: "token", index, limit });
            };
            for expert in experts.row_mut::<i32>(t) {
                let (index, limit) = (i64::from(*expert), placement.rows());
                if !(0..limit as i64).contains(&index) {
                    return Err(DeviceError::Index {
                        kernel: KERNEL,
                        what: "expert",
                        index,
                        limit,
                    });
                }
                let row = placement.row::<i32>(index as usize);
                *expert = row[1 + position.max(0) as usize % row[0].max(1) as usize];
            }
        }
        Ok(())
    }
}

/// Row kernel: adds a weighted row, `sum = sum + weight · x`.
struct WeightedAccumulation<'a> {
    sum: &'a mut [f32],
    x: &'a [f32],
    weight: f32,
}

impl RowKernel for WeightedAccumulation<'_> {
    #[inline(always)]
    fn run(self) {
        for (sum, x) in self.sum.iter_mut().zip(self.x) {
            *sum += self.weight * x;
        }
    }
}

/// Scratch buffers of the expert MLPs, reused by later launches.
#[derive(Debug, Default)]
pub(super) struct MoeWorkspace(Vec<Buffer>);

impl MoeWorkspace {
    /// Returns one buffer for each entry of `bytes`; buffer `i` has at least `bytes[i]` bytes.
    fn buffers<const N: usize>(
        &mut self,
        alloc: impl Fn(usize) -> Result<Buffer, DeviceError>,
        bytes: [usize; N],
    ) -> Result<&mut [Buffer; N], DeviceError> {
        for (i, &bytes) in bytes.iter().enumerate() {
            if i == self.0.len() {
                self.0.push(alloc(bytes)?);
            } else if self.0[i].bytes() < bytes {
                self.0[i] = alloc(bytes.next_power_of_two())?;
            }
        }
        Ok(self.0[..N].as_mut_array().expect("one buffer per size"))
    }
}

const MLP: &str = "moe_mlp";

/// A token that is routed to an expert.
#[derive(Debug, Clone, Copy)]
struct ExpertToken {
    /// Index of the token in the step.
    token: usize,
    /// Routing weight of the expert for this token.
    weight: f32,
}

/// For each expert of this rank, the tokens routed to it in ascending order.
struct TokensByExpert {
    groups: Vec<Vec<ExpertToken>>,
}

impl TokensByExpert {
    fn new(routes: &TopKRoutes<'_>, experts: &ExpertWeights<'_>) -> Self {
        let mut groups = vec![Vec::new(); experts.gate_up.len()];
        for token in 0..routes.experts.rows() {
            let weights = routes.weights.row::<f32>(token);
            let chosen = routes.experts.row::<i32>(token).iter().zip(weights);
            for (&e, &weight) in chosen {
                let local =
                    usize::try_from(e).ok().and_then(|e| e.checked_sub(experts.first_expert));
                if let Some(group) = local.and_then(|e| groups.get_mut(e)) {
                    group.push(ExpertToken { token, weight });
                }
            }
        }
        Self { groups }
    }
}

fn check_mlp(
    y: &MatMut<'_>,
    x: MatRef<'_>,
    routes: &TopKRoutes<'_>,
    experts: &ExpertWeights<'_>,
) -> Result<(), DeviceError> {
    check_size(MLP, "rows", y.rows(), x.rows())?;
    check_size(MLP, "columns", y.cols(), x.cols())?;
    check_dtype(MLP, "output", y.dtype(), x.dtype())?;
    check_size(MLP, "rows of experts", routes.experts.rows(), x.rows())?;
    check_size(MLP, "rows of weights", routes.weights.rows(), x.rows())?;
    check_size(MLP, "columns of weights", routes.weights.cols(), routes.experts.cols())?;
    check_dtype(MLP, "experts", routes.experts.dtype(), DType::I32)?;
    check_dtype(MLP, "weights", routes.weights.dtype(), DType::F32)?;
    check_size(MLP, "down projections", experts.down.len(), experts.gate_up.len())?;
    check_size(MLP, "inputs of gate_up", experts.gate_up.k(), x.cols())?;
    check_size(MLP, "outputs of gate_up", experts.gate_up.n(), 2 * experts.down.k())?;
    check_size(MLP, "outputs of down", experts.down.n(), x.cols())?;
    experts.check_biases(MLP)
}
