//! Launches beside a step: their order, their recording, and memory that streams do not share.

use kernels::{Around, DType, Driver, Graph, HostMat, Kernels, Stream, bf16};
use std::process::Command;

use crate::pair::{Pair, Twin, bytes_of, pairs};
use crate::support::S;

const FLOATS: usize = 1000;

/// Sums of which some are made aside.
struct Sums<'a> {
    pair: &'a Pair,
    side: Stream,
    x: Twin,
    before: Twin,
    aside: Twin,
    meanwhile: Twin,
    behind: Twin,
}

impl<'a> Sums<'a> {
    fn new(pair: &'a Pair) -> Self {
        let side = pair.gpu.side().expect("nothing is marked");
        let [before, aside, meanwhile, behind] =
            [(); 4].map(|()| pair.poisoned(DType::F32, 1, FLOATS));
        let x = pair.put(&[1f32; FLOATS], 1, FLOATS);
        Self { pair, side, x, before, aside, meanwhile, behind }
    }

    /// Seven times x: four of them aside.
    fn launch(&mut self, joined: bool) {
        let (gpu, x) = (&self.pair.gpu, self.x.gpu());
        gpu.add(&S, self.before.gpu_mut(), x, x).unwrap();
        gpu.follow(&self.side, &S).unwrap();
        let before = self.before.gpu();
        gpu.add(&self.side, self.aside.gpu_mut(), before, before).unwrap();
        gpu.add(&S, self.meanwhile.gpu_mut(), before, x).unwrap();
        if joined {
            gpu.follow(&S, &self.side).unwrap();
        }
        gpu.add(&S, self.behind.gpu_mut(), self.aside.gpu(), self.meanwhile.gpu()).unwrap();
    }

    fn capture(&mut self, joined: bool) -> Result<Graph, kernels::DeviceError> {
        self.pair.gpu.begin_capture(&S).unwrap();
        self.launch(joined);
        self.pair.gpu.end_capture(&S)
    }

    fn set(&mut self, value: f32) {
        self.pair.gpu.upload(&mut self.x.gpu, 0, &bytes_of(&[value; FLOATS])).unwrap();
    }

    fn check(&self, value: f32) {
        assert_eq!(self.pair.read_gpu::<f32>(&self.behind), [7.0 * value; FLOATS]);
    }
}

fn order(pair: &Pair) {
    let mut sums = Sums::new(pair);
    for value in [1.0, 3.0] {
        sums.set(value);
        sums.launch(true);
        sums.check(value);
    }
    let graph = sums.capture(true).unwrap();
    for value in [5.0, 7.0] {
        sums.set(value);
        pair.gpu.replay(&S, &graph).unwrap();
        sums.check(value);
    }
}

#[test]
fn what_is_made_aside_comes_behind_and_before_what_it_should() {
    pairs().iter().for_each(order);
}

#[test]
#[ignore = "run by streams_that_do_not_follow_each_other_run_in_any_order"]
fn lazily() {
    for pair in &pairs() {
        order(pair);
        scratch(pair);
    }
}

/// Emulated devices that run a stream only when somebody waits for it: without the joins sums are wrong there, and where streams take turns, scratch memory
/// that they shared would be overwritten.
#[test]
fn streams_that_do_not_follow_each_other_run_in_any_order() {
    if std::env::var_os("HADRON_GPU").is_some() {
        return; // A real one has its own order.
    }
    for lazy in ["1", "2"] {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "side::lazily"])
            .env("HIPEMU_LAZY", lazy)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }
}

/// And the device records again after that.
#[test]
fn a_recording_that_is_not_joined_is_none() {
    for pair in &pairs() {
        let mut sums = Sums::new(pair);
        sums.launch(true);
        assert!(sums.capture(false).is_err());
        let graph = sums.capture(true).unwrap();
        sums.set(2.0);
        pair.gpu.replay(&S, &graph).unwrap();
        sums.check(2.0);
    }
}

/// Launches that are marked are one behind the other, so nothing is made aside.
#[test]
fn there_is_no_side_while_launches_are_marked() {
    for pair in &pairs() {
        let marks = pair.gpu.alloc_marks(2).unwrap();
        pair.gpu.begin_marking(&marks, 0);
        assert_eq!(pair.gpu.side(), None);
        assert!(pair.gpu.end_marking().is_empty());
        assert!(pair.gpu.side().is_some_and(|side| side != S));
    }
}

const ROWS: usize = 24;
const N: usize = 256;
const K: usize = 1024;

/// Norms leave rows in scratch memory for products; those of two streams at once do not take each other's.
fn scratch(pair: &Pair) {
    let (gpu, half) = (&pair.gpu, pair.gpu.half());
    let [w, _] = pair.pack(&pair.numbers(1).reals::<f32>(N * K), N, K, half);
    if !gpu.fuses(ROWS, half, &w) {
        return; // Such products have their norm before them.
    }
    let norm = pair.put_as(half, &[1.0; K], 1, K);
    let around = Around { norm: Some((norm.gpu(), 1e-6)), ..Around::default() };
    let streams = [S, gpu.side().expect("nothing is marked")];
    let xs =
        [2, 3].map(|salt| pair.put_as(half, &pair.numbers(salt).reals::<f32>(ROWS * K), ROWS, K));
    let outputs = || [(); 2].map(|()| pair.poisoned(half, ROWS, N));
    let (mut alone, mut both) = (outputs(), outputs());
    let product = |s: &Stream, y: &mut Twin, x: &Twin| {
        gpu.linear_around(s, y.gpu_mut(), x.gpu(), &w, &around).unwrap();
    };
    for (s, (y, x)) in streams.iter().zip(alone.iter_mut().zip(&xs)) {
        product(s, y, x);
        gpu.synchronize(s).unwrap();
    }
    for _ in 0..20 {
        gpu.follow(&streams[1], &S).unwrap();
        for (s, (y, x)) in streams.iter().zip(both.iter_mut().zip(&xs)) {
            product(s, y, x);
        }
        gpu.follow(&S, &streams[1]).unwrap();
        gpu.synchronize(&S).unwrap();
        for (alone, both) in alone.iter().zip(&both) {
            assert_eq!(pair.read_gpu::<bf16>(both), pair.read_gpu::<bf16>(alone));
        }
    }
}

#[test]
fn streams_share_no_scratch_memory() {
    pairs().iter().for_each(scratch);
}

/// Where shared experts are computed: among others in lines of 16 bits, never among lines in fp8.
#[test]
fn shared_experts_lie_where_they_are_fast() {
    for pair in &pairs() {
        let (gpu, half) = (&pair.gpu, pair.gpu.half());
        let takes = |dtype: DType, scaled: bool| {
            let (bytes, scales) = (vec![0u8; 256 * 128 * 2], vec![1f32; 2]);
            let mat = |n: usize, k: usize| {
                let mat = HostMat::new(&bytes[..n * k * dtype.bytes()], dtype, n, k).unwrap();
                let blocks = n.div_ceil(128) * k.div_ceil(128);
                if scaled { mat.scaled(&scales[..blocks], [128; 2]).unwrap() } else { mat }
            };
            let (gate_up, down) = ([vec![mat(128, 128), mat(128, 128)]], [vec![mat(128, 128)]]);
            gpu.takes_shared(&gate_up, &down, 1, half)
        };
        assert!(takes(DType::BF16, false));
        // Only where fp8 is streamed.
        let streams = gpu.arch() == "sm_90a" || (gpu.arch() == "emulated" && gpu.wave() == 32);
        assert_eq!(takes(DType::F8E4M3, true), !streams);
        assert_eq!([1, 16, 17, 4096].map(|n| gpu.joins_shared(n)), [true, true, false, false]);
        let [w, _] = pair.pack(&[0.0; 256], 16, 16, half);
        assert_eq!([1, 16, 17].map(|n| gpu.runs_beside(n, &w)), [false, false, true]);
        let bytes = [0u8; 128 * 128];
        let fp8 = HostMat::new(&bytes, DType::F8E4M3, 128, 128).unwrap();
        let fp8 = gpu.pack(&[fp8.scaled(&[1.0], [128; 2]).unwrap()], half).unwrap();
        assert!(gpu.runs_beside(1, &fp8));
    }
}
