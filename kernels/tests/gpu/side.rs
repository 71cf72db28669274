//! Launches beside a step: their order, their recording, and memory that streams do not share.

use kernels::{Around, DType, Driver, Graph, Kernels, Stream, bf16};
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
    pairs().iter().for_each(order);
}

/// An emulated device that runs a stream only when somebody waits for it: without the joins sums are wrong there.
#[test]
fn streams_that_do_not_follow_each_other_run_in_any_order() {
    if std::env::var_os("HADRON_GPU").is_some() {
        return; // A real one has its own order.
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "side::lazily"])
        .env("HIPEMU_LAZY", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("1 passed"), "{said}");
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

/// Norms leave rows in scratch memory for products; those of two streams at once do not take each other's.
#[test]
fn streams_share_no_scratch_memory() {
    const ROWS: usize = 24;
    const N: usize = 256;
    const K: usize = 1024;
    for pair in &pairs() {
        let (gpu, half) = (&pair.gpu, pair.gpu.half());
        let values: Vec<f32> = pair.numbers(1).reals::<f32>(N * K);
        let [w, _] = pair.pack(&values, N, K, half);
        let norm = pair.put_as(half, &[1.0; K], 1, K);
        let around = Around { norm: Some((norm.gpu(), 1e-6)), ..Around::default() };
        let side = gpu.side().expect("nothing is marked");
        let streams = [S, side];
        let xs = [2, 3]
            .map(|salt| pair.put_as(half, &pair.numbers(salt).reals::<f32>(ROWS * K), ROWS, K));
        let outputs = || [(); 2].map(|()| pair.poisoned(half, ROWS, N));
        let (mut alone, mut both) = (outputs(), outputs());
        let product = |s: &Stream, y: &mut Twin, x: &Twin| {
            if gpu.fuses(ROWS, half, &w) {
                gpu.linear_around(s, y.gpu_mut(), x.gpu(), &w, &around).unwrap();
            } else {
                gpu.linear(s, y.gpu_mut(), x.gpu(), &w, None).unwrap();
            }
        };
        for (s, (y, x)) in streams.iter().zip(alone.iter_mut().zip(&xs)) {
            product(s, y, x);
            gpu.synchronize(s).unwrap();
        }
        for _ in 0..50 {
            gpu.follow(&side, &S).unwrap();
            for (s, (y, x)) in streams.iter().zip(both.iter_mut().zip(&xs)) {
                product(s, y, x);
            }
            gpu.follow(&S, &side).unwrap();
            for (alone, both) in alone.iter().zip(&both) {
                assert_eq!(pair.read_gpu::<bf16>(both), pair.read_gpu::<bf16>(alone));
            }
        }
    }
}
