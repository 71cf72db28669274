//! What experts that all tokens share cost among those that tokens choose, and by themselves: what `joins_shared` decides by. All inside a
//! captured graph. Printed, not judged.

use kernels::{Around, DType, Experts, HostMat, Kernels, Packed, PackedGroup, Routes, bf16};

use crate::matrix_speed::{microseconds, report};
use crate::pair::{Pair, Twin, pairs};
use crate::support::S;

/// A layer: what it is called, and its sizes.
struct Layer {
    name: &'static str,
    hidden: usize,
    inner: usize,
    routed: usize,
    shared: usize,
    top_k: usize,
    dtype: DType,
}

const LAYERS: [Layer; 3] = [
    Layer {
        name: "V2-Lite",
        hidden: 2048,
        inner: 1408,
        routed: 64,
        shared: 2,
        top_k: 6,
        dtype: DType::BF16,
    },
    Layer {
        name: "V3 of 8 ranks",
        hidden: 7168,
        inner: 256,
        routed: 256,
        shared: 1,
        top_k: 8,
        dtype: DType::F8E4M3,
    },
    Layer {
        name: "V3",
        hidden: 7168,
        inner: 2048,
        routed: 256,
        shared: 1,
        top_k: 8,
        dtype: DType::F8E4M3,
    },
];

/// On one device.
struct Weights {
    gate_up: PackedGroup,
    down: PackedGroup,
    /// The shared experts once more, as one MLP.
    apart: [Packed; 2],
}

impl Layer {
    fn pack(&self, pair: &Pair) -> Weights {
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
        let half = pair.gpu.half();
        let both = [mat(shared * inner, hidden), mat(shared * inner, hidden)];
        Weights {
            gate_up: group(&[mat(inner, hidden), mat(inner, hidden)], true),
            down: group(&[mat(hidden, inner)], false),
            apart: [
                pair.gpu.pack(&both, half).unwrap(),
                pair.gpu.pack(&[mat(hidden, shared * inner)], half).unwrap(),
            ],
        }
    }

    /// Experts and weights of each token, with or without those that all share.
    fn routes(&self, pair: &Pair, tokens: usize, with: bool) -> [Twin; 2] {
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

    /// Microseconds among the others and by themselves, and bytes of the weights that either reads.
    fn times(&self, pair: &Pair, w: &Weights, tokens: usize) -> ([f64; 2], usize) {
        let (half, inner) = (pair.gpu.half(), self.shared * self.inner);
        let x = pair.put(&vec![bf16::ONE; tokens * self.hidden], tokens, self.hidden);
        let (mut y, mut own) = [(); 2].map(|()| pair.poisoned(half, tokens, self.hidden)).into();
        let mut sum = pair.poisoned(half, tokens, self.hidden);
        let mut both = pair.poisoned(half, tokens, 2 * inner);
        let mut between = pair.poisoned(half, tokens, inner);
        let experts = Experts { first: 0, gate_up: &w.gate_up, down: &w.down };
        let [among, alone] = [true, false].map(|with| self.routes(pair, tokens, with));
        let routed = |y: &mut Twin, [chosen, weights]: &[Twin; 2]| {
            let routes = Routes { experts: chosen.gpu(), weights: weights.gpu() };
            pair.gpu.moe_mlp(&S, y.gpu_mut(), x.gpu(), &routes, &experts).unwrap();
        };
        let [gate_up, down] = &w.apart;
        let gated = Around { silu_mul: true, ..Around::default() };
        let joined = microseconds(pair, 8, |_| routed(&mut y, &among));
        let apart = microseconds(pair, 8, |_| {
            routed(&mut y, &alone);
            if pair.gpu.fuses_silu_mul(tokens, half, gate_up) {
                pair.gpu.linear_around(&S, between.gpu_mut(), x.gpu(), gate_up, &gated).unwrap();
            } else {
                pair.gpu.linear(&S, both.gpu_mut(), x.gpu(), gate_up, None).unwrap();
                pair.gpu.silu_mul(&S, between.gpu_mut(), both.gpu()).unwrap();
            }
            pair.gpu.linear(&S, own.gpu_mut(), between.gpu(), down, None).unwrap();
            pair.gpu.add(&S, sum.gpu_mut(), y.gpu(), own.gpu()).unwrap();
        });
        let [chosen, _] = pair.read::<i32>(&among[0]);
        let busy: std::collections::BTreeSet<i32> = chosen.into_iter().collect();
        ([joined, apart], busy.len() * 3 * self.hidden * self.inner * self.dtype.bytes())
    }
}

#[test]
#[ignore = "measures a GPU, named by HADRON_GPU"]
fn shared_speed() {
    for pair in &pairs() {
        for layer in &LAYERS {
            let weights = layer.pack(pair);
            let experts = Experts { first: 0, gate_up: &weights.gate_up, down: &weights.down };
            for tokens in [1, 2, 4, 8, 16, 32, 64, 256, 2048] {
                let (times, bytes) = layer.times(pair, &weights, tokens);
                let joins = pair.gpu.joins_shared(tokens, &experts);
                for (way, time) in ["among", "apart"].into_iter().zip(times) {
                    let chosen = if joins == (way == "among") { ", chosen" } else { "" };
                    report(&format!("{}, {tokens} tokens, {way}{chosen}", layer.name), time, bytes);
                }
            }
        }
    }
}
