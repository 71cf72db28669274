//! Packing of the experts of a layer in the layout of the device's expert kernels, and of shared experts with
//! them or as a separate MLP.

use kernels::{GateActivation, HostMat};

use crate::error::check_size;
use crate::{ExpertBiases, OpError, Ops, PackedExperts};

/// Gate, up and down projections of several experts, in host memory.
#[derive(Debug)]
pub struct ExpertMatrices<'a> {
    /// Stacked gate and up projections: for each expert, the list of matrices whose rows are stacked.
    pub gate_up: Vec<Vec<HostMat<'a>>>,
    /// Down projection: for each expert, the list of its matrices.
    pub down: Vec<Vec<HostMat<'a>>>,
}

impl<'a> ExpertMatrices<'a> {
    /// Splits MLPs, each with the projections gate, up and down, into `count` experts of equal width.
    #[must_use]
    pub fn split(mlps: &[[HostMat<'a>; 3]], count: usize) -> Self {
        let mut all = Self { gate_up: Vec::new(), down: Vec::new() };
        for [gate, up, down] in mlps {
            let width = down.cols() / count;
            for first in (0..count).map(|i| i * width) {
                all.gate_up.push(vec![gate.row_range(first, width), up.row_range(first, width)]);
                all.down.push(vec![down.column_range(first, width)]);
            }
        }
        all
    }
}

/// Shared experts of a layer in host memory, as one MLP.
#[derive(Debug, Clone, Copy)]
pub struct SharedExpertMatrices<'a> {
    /// Gate, up and down projections of the MLP.
    pub mlp: [HostMat<'a>; 3],
    /// Number of experts of equal width that the MLP contains.
    pub count: usize,
}

impl Ops {
    /// Packs experts, the first of which has index `first_expert` in its layer. The model has the same number
    /// of experts in each of `layers` layers. For each expert, `gate_up` has matrices that stack to `[2 ·
    /// intermediate_size, hidden_size]`, gate rows first, and `down` has one matrix `[hidden_size,
    /// intermediate_size]`. `activation` computes the input of a down projection from gate and up.
    pub fn pack_experts(
        &self,
        first_expert: usize,
        layers: usize,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        activation: GateActivation,
    ) -> Result<PackedExperts, OpError> {
        let dtype = self.device.experts_dtype(gate_up, down, layers, self.dtype());
        let gate_up = self.device.pack_group(gate_up, dtype, true)?;
        let down = self.device.pack_group(down, dtype, false)?;
        check_size("pack_experts", "down projections", down.len(), gate_up.len())?;
        check_size("pack_experts", "outputs of gate_up", gate_up.n(), 2 * down.k())?;
        check_size("pack_experts", "outputs of down", down.n(), gate_up.k())?;
        Ok(PackedExperts {
            first: first_expert,
            gate_up,
            down,
            activation,
            biases: None,
            shared: 0,
            separate_shared: None,
        })
    }

    /// Packs experts with biases: as [`Ops::pack_experts`], but in the layout of the kernels that add biases,
    /// dequantised to the model's type. `is_mxfp4`: the checkpoint stores the experts in MXFP4, which GPUs keep.
    pub fn pack_biased_experts(
        &self,
        first_expert: usize,
        gate_up: &[Vec<HostMat<'_>>],
        down: &[Vec<HostMat<'_>>],
        activation: GateActivation,
        biases: ExpertBiases,
        is_mxfp4: bool,
    ) -> Result<PackedExperts, OpError> {
        let pack =
            |matrices: &[Vec<HostMat<'_>>]| self.device.pack_row_major(matrices, self.dtype());
        let [gate_up, down] = if is_mxfp4 {
            self.device.pack_mxfp4_experts(gate_up, down, self.dtype())?
        } else {
            [pack(gate_up)?, pack(down)?]
        };
        let packed = PackedExperts {
            first: first_expert,
            gate_up,
            down,
            activation,
            biases: Some(biases),
            shared: 0,
            separate_shared: None,
        };
        check_size("pack_experts", "outputs of gate_up", packed.gate_up.n(), 2 * packed.down.k())?;
        Ok(packed)
    }

    /// Packs all routed experts of a layer as [`Ops::pack_experts`] does, and its shared experts: after the routed
    /// experts, so that each token can be routed to them, and also as a separate MLP if linear layers cannot
    /// read packed experts. If routed experts run as an fp8 grouped GEMM with TMA, shared experts are packed as a
    /// separate MLP only, because it is then always faster.
    pub fn pack_experts_with_shared(
        &self,
        layers: usize,
        routed: ExpertMatrices<'_>,
        shared: &SharedExpertMatrices<'_>,
        activation: GateActivation,
    ) -> Result<PackedExperts, OpError> {
        let ExpertMatrices { gate_up, down } = &routed;
        if self.device.has_fp8_tma_experts(gate_up, down, layers, self.dtype()) {
            let packed = self.pack_experts(0, layers, gate_up, down, activation)?;
            return self.with_separate_shared(packed, shared);
        }
        let packed = self.pack_with_appended_shared(layers, routed, shared, activation)?;
        match packed.shared_linears() {
            Some(_) => Ok(packed),
            None => self.with_separate_shared(packed, shared),
        }
    }

    fn pack_with_appended_shared(
        &self,
        layers: usize,
        routed: ExpertMatrices<'_>,
        shared: &SharedExpertMatrices<'_>,
        activation: GateActivation,
    ) -> Result<PackedExperts, OpError> {
        let ExpertMatrices { mut gate_up, mut down } = routed;
        let experts = ExpertMatrices::split(&[shared.mlp], shared.count);
        gate_up.extend(experts.gate_up);
        down.extend(experts.down);
        let packed = self.pack_experts(0, layers, &gate_up, &down, activation)?;
        Ok(PackedExperts { shared: shared.count, ..packed })
    }

    fn with_separate_shared(
        &self,
        packed: PackedExperts,
        shared: &SharedExpertMatrices<'_>,
    ) -> Result<PackedExperts, OpError> {
        let [gate, up, down] = shared.mlp;
        let separate = [self.pack_linear(&[gate, up], None)?, self.pack_linear(&[down], None)?];
        Ok(PackedExperts { separate_shared: Some(separate), ..packed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExpertsPerToken, RouterRule, SharedExperts};
    use device::{CpuConfig, DType};
    use kernels::RouterScoreFunction;
    use kernels::cpu::CpuBackend;

    const HIDDEN: usize = 8;
    const WIDTH: usize = 4;

    /// Little-endian f32 values of the projections gate, up and down of an MLP.
    fn mlp_bytes(width: usize, seed: usize) -> [Vec<u8>; 3] {
        let values = |i: usize| ((i * 37 + seed * 11) % 29) as f32 / 16.0 - 0.875;
        [0, 1, 2].map(|projection| {
            let elements = (0..width * HIDDEN).map(|i| values(i + projection * 5));
            elements.flat_map(f32::to_le_bytes).collect()
        })
    }

    fn mlp(bytes: &[Vec<u8>; 3], width: usize) -> [HostMat<'_>; 3] {
        let [gate, up, down] = bytes;
        let mat = |bytes, rows, cols| HostMat::new(bytes, DType::F32, rows, cols).unwrap();
        [mat(gate, width, HIDDEN), mat(up, width, HIDDEN), mat(down, HIDDEN, width)]
    }

    fn output(ops: &Ops, experts: &PackedExperts) -> Vec<f32> {
        let numbers = |n: usize| (0..n).map(|i| (i % 7) as f32 / 4.0 - 0.75).collect::<Vec<_>>();
        let h = ops.floats(&numbers(3 * HIDDEN), DType::F32, &[3, HIDDEN]).unwrap();
        let logits = ops.floats(&numbers(3 * 2), DType::F32, &[3, 2]).unwrap();
        let rule = RouterRule {
            score: RouterScoreFunction::Softmax,
            bias: None,
            groups: None,
            renormalise: true,
            scale: 1.0,
        };
        let routed = |shared| {
            let per_token = ExpertsPerToken { top_k: 1, shared };
            ops.moe(&h, &logits, per_token, &rule, experts, None)
        };
        let shared = SharedExperts::from_packed(experts);
        let y = ops.with_shared_experts::<OpError>(&h, experts, &shared, false, routed).unwrap();
        ops.read_f32(&y).unwrap()
    }

    #[test]
    fn appended_and_separate_shared_experts_add_the_same_output() {
        let cpu = CpuBackend::new(CpuConfig { threads: 1, ..CpuConfig::default() }).unwrap();
        let ops = Ops::new(cpu.into(), DType::F32).unwrap();
        let bytes = [mlp_bytes(WIDTH, 1), mlp_bytes(WIDTH, 2)];
        let shared_bytes = mlp_bytes(2 * WIDTH, 3);
        let routed =
            || ExpertMatrices::split(&bytes.each_ref().map(|mlp_bytes| mlp(mlp_bytes, WIDTH)), 1);
        let shared = SharedExpertMatrices { mlp: mlp(&shared_bytes, 2 * WIDTH), count: 2 };
        let activation = GateActivation::Silu;
        let appended = ops.pack_experts_with_shared(1, routed(), &shared, activation).unwrap();
        assert_eq!((appended.len(), appended.shared()), (4, 2));
        let ExpertMatrices { gate_up, down } = routed();
        let plain = ops.pack_experts(0, 1, &gate_up, &down, activation).unwrap();
        assert!(!plain.has_shared_experts());
        let without = output(&ops, &plain);
        let separate = ops.with_separate_shared(plain, &shared).unwrap();
        assert_eq!((separate.len(), separate.shared()), (2, 0));
        assert!(appended.has_shared_experts() && separate.has_shared_experts());
        let (a, b) = (output(&ops, &appended), output(&ops, &separate));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} {b:?}");
        assert!(a.iter().zip(&without).any(|(a, w)| (a - w).abs() > 0.1), "{a:?} {without:?}");
    }
}
