//! Times of shared experts that are fused with the routed experts, run after them, or overlap them on a
//! secondary stream, on which the choice of a `SharedExpertPlan` is based. Times include the router and are
//! measured inside a captured graph. They are printed, not checked.

use std::sync::Arc;

use device::{DType, DeviceDriver, DeviceStream, bf16};
use kernels::{
    ExpertMlp, ExpertWeights, FusedLinear, GateActivation, GatedActivation, HostMat, Linear,
    LinearFusion, PackedMatrix, PackedMatrixGroup, TensorAdd, TopKRoutes,
};

use crate::device_pair::{CpuGpuMatrix, CpuGpuPair, pairs};
use crate::matrix_speed::{microseconds, report};
use crate::support::S;

/// Name and sizes of an MoE layer with shared experts.
struct SharedExpertLayer {
    name: &'static str,
    hidden: usize,
    inner: usize,
    routed: usize,
    shared: usize,
    top_k: usize,
    dtype: DType,
}

const LAYERS: [SharedExpertLayer; 3] = [
    SharedExpertLayer {
        name: "V2-Lite",
        hidden: 2048,
        inner: 1408,
        routed: 64,
        shared: 2,
        top_k: 6,
        dtype: DType::BF16,
    },
    SharedExpertLayer {
        name: "V3, EP 8",
        hidden: 7168,
        inner: 256,
        routed: 256,
        shared: 1,
        top_k: 8,
        dtype: DType::F8E4M3,
    },
    SharedExpertLayer {
        name: "V3",
        hidden: 7168,
        inner: 2048,
        routed: 256,
        shared: 1,
        top_k: 8,
        dtype: DType::F8E4M3,
    },
];

/// Weights of an MoE layer on the GPU, with the shared experts both in the packed groups of all experts and
/// as a separate MLP.
struct SharedExpertWeights {
    gate_up: PackedMatrixGroup,
    down: PackedMatrixGroup,
    /// The shared experts as a separate MLP: gate and up projections, then the down projection.
    separate: [PackedMatrix; 2],
    router: PackedMatrix,
}

/// How the shared experts run relative to the routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SharedExpertSchedule {
    Fused,
    Sequential,
    Overlapped,
}

impl SharedExpertLayer {
    fn pack(&self, pair: &CpuGpuPair) -> SharedExpertWeights {
        let Self { hidden, inner, shared, dtype, .. } = *self;
        let bytes = vec![0x38u8; 2 * shared * inner * hidden * dtype.bytes()];
        let scales = vec![1e-3f32; (2 * shared * inner).div_ceil(128) * hidden.div_ceil(128)];
        let mat = |n: usize, k: usize| {
            let mat = HostMat::new(&bytes[..n * k * dtype.bytes()], dtype, n, k).unwrap();
            let blocks = n.div_ceil(128) * k.div_ceil(128);
            if dtype == DType::BF16 {
                mat
            } else {
                mat.scaled(&scales[..blocks], [128; 2]).unwrap()
            }
        };
        let group = |parts: &[HostMat<'_>], gated| {
            let parts: Vec<_> = (0..self.routed + shared).map(|_| parts.to_vec()).collect();
            pair.gpu.pack_group(&parts, dtype, gated).unwrap()
        };
        let half = pair.gpu.half_dtype();
        let router = vec![0u8; self.routed * hidden * 2];
        let router = HostMat::new(&router, DType::BF16, self.routed, hidden).unwrap();
        let both = [mat(shared * inner, hidden), mat(shared * inner, hidden)];
        SharedExpertWeights {
            gate_up: group(&[mat(inner, hidden), mat(inner, hidden)], true),
            down: group(&[mat(hidden, inner)], false),
            separate: [
                pair.gpu.pack(&both, half).unwrap(),
                pair.gpu.pack(&[mat(hidden, shared * inner)], half).unwrap(),
            ],
            router: pair.gpu.pack(&[router], half).unwrap(),
        }
    }

    /// Returns the expert ids and routing weights of each token, with the shared experts if `with` is true.
    fn routes(&self, pair: &CpuGpuPair, tokens: usize, with: bool) -> [CpuGpuMatrix; 2] {
        let mut numbers = pair.numbers(tokens as u64);
        let shared = if with { self.shared } else { 0 };
        let (mut chosen, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let (first, step) =
                (numbers.below(self.routed), 1 + 2 * numbers.below(self.routed / 2));
            chosen.extend((0..self.top_k).map(|j| ((first + j * step) % self.routed) as i32));
            chosen.extend((0..shared).map(|j| (self.routed + j) as i32));
            weights.extend(std::iter::repeat_n(0.125f32, self.top_k));
            weights.extend(std::iter::repeat_n(1.0, shared));
        }
        let k = self.top_k + shared;
        [pair.put(&chosen, tokens, k), pair.put(&weights, tokens, k)]
    }

    /// Returns the microseconds of each `SharedExpertSchedule`, and the number of weight bytes that a
    /// schedule reads.
    fn times(
        &self,
        pair: &CpuGpuPair,
        w: &SharedExpertWeights,
        tokens: usize,
    ) -> ([f64; 3], usize) {
        let (half, inner) = (pair.gpu.half_dtype(), self.shared * self.inner);
        let x = pair.put(&vec![bf16::ONE; tokens * self.hidden], tokens, self.hidden);
        let (mut y, mut own) = [(); 2].map(|()| pair.poisoned(half, tokens, self.hidden)).into();
        let mut sum = pair.poisoned(half, tokens, self.hidden);
        let mut both = pair.poisoned(half, tokens, 2 * inner);
        let mut between = pair.poisoned(half, tokens, inner);
        let mut logits = pair.poisoned(DType::F32, tokens, self.routed);
        let experts = ExpertWeights::unbiased(0, &w.gate_up, &w.down);
        let [fused, routed_only] = [true, false].map(|with| self.routes(pair, tokens, with));
        let [gate_up, down] = &w.separate;
        let gated = LinearFusion { gate: Some(GateActivation::Silu), ..LinearFusion::default() };
        let gpu = &pair.gpu;
        let mut shared = |s: &DeviceStream, own: &mut CpuGpuMatrix| {
            if FusedLinear::supports_gate(&Arc::clone(gpu).into(), tokens, half, gate_up) {
                gpu.launch(
                    s,
                    FusedLinear {
                        y: between.gpu_mut(),
                        x: x.gpu(),
                        weight: gate_up,
                        fusion: &gated,
                    },
                )
                .unwrap();
            } else {
                gpu.launch(
                    s,
                    Linear { y: both.gpu_mut(), x: x.gpu(), weight: gate_up, bias: None },
                )
                .unwrap();
                let activation = GateActivation::Silu;
                let op = GatedActivation { y: between.gpu_mut(), x: both.gpu(), activation };
                gpu.launch(s, op).unwrap();
            }
            gpu.launch(s, Linear { y: own.gpu_mut(), x: between.gpu(), weight: down, bias: None })
                .unwrap();
        };
        let secondary = gpu.secondary_stream().expect("no kernel timestamps are active");
        let times = [
            SharedExpertSchedule::Fused,
            SharedExpertSchedule::Sequential,
            SharedExpertSchedule::Overlapped,
        ]
        .map(|placement| {
            let [chosen, weights] =
                if placement == SharedExpertSchedule::Fused { &fused } else { &routed_only };
            microseconds(pair, 8, |_| {
                if placement == SharedExpertSchedule::Overlapped {
                    gpu.stream_wait(&secondary, &S).unwrap();
                }
                gpu.launch(
                    &S,
                    Linear { y: logits.gpu_mut(), x: x.gpu(), weight: &w.router, bias: None },
                )
                .unwrap();
                let routes = TopKRoutes { experts: chosen.gpu(), weights: weights.gpu() };
                gpu.launch(
                    &S,
                    ExpertMlp { y: y.gpu_mut(), x: x.gpu(), routes: &routes, experts: &experts },
                )
                .unwrap();
                match placement {
                    SharedExpertSchedule::Fused => return,
                    SharedExpertSchedule::Sequential => shared(&S, &mut own),
                    SharedExpertSchedule::Overlapped => {
                        shared(&secondary, &mut own);
                        gpu.stream_wait(&S, &secondary).unwrap();
                    }
                }
                gpu.launch(&S, TensorAdd { y: sum.gpu_mut(), a: y.gpu(), b: own.gpu() }).unwrap();
            })
        });
        let [chosen, _] = pair.read::<i32>(&fused[0]);
        let active_experts: std::collections::BTreeSet<i32> = chosen.into_iter().collect();
        (times, active_experts.len() * 3 * self.hidden * self.inner * self.dtype.bytes())
    }
}

#[test]
#[ignore = "measures a GPU: `just gpu-speed`"]
fn shared_expert_speed() {
    for pair in &pairs() {
        for layer in &LAYERS {
            let weights = layer.pack(pair);
            for tokens in [1, 2, 4, 8, 16, 32, 64, 256, 2048] {
                let (times, bytes) = layer.times(pair, &weights, tokens);
                let fusible = layer.dtype == DType::BF16 || pair.gpu.arch() != "sm_90a";
                let fuses = fusible && tokens <= 16; // The rule of `ops::SharedExpertPlan`.
                let best = if fuses {
                    SharedExpertSchedule::Fused
                } else {
                    SharedExpertSchedule::Overlapped
                };
                for (placement, time) in [
                    SharedExpertSchedule::Fused,
                    SharedExpertSchedule::Sequential,
                    SharedExpertSchedule::Overlapped,
                ]
                .into_iter()
                .zip(times)
                {
                    let chosen = if placement == best { ", chosen" } else { "" };
                    let name = layer.name;
                    report(&format!("{name}, {tokens} tokens, {placement:?}{chosen}"), time, bytes);
                }
            }
        }
    }
}
