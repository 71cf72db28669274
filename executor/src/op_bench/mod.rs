//! Benchmark of single ops on one device: `hadron bench ops`.
//!
//! Every op is timed alone, with random inputs and weights in the shapes of a model configuration. A timed
//! run contains many launches. Successive launches rotate through several copies of the weights or KV blocks,
//! so that each launch reads from memory and not from a cache, as in a forward pass.

mod attention_ops;
mod dense_ops;
mod expert_ops;
mod kv_batches;
mod mla_ops;
mod op_timer;
mod random_weights;
#[cfg(test)]
mod tests;

use crate::open_device::{self, DeviceOpenOptions, OpenedDevice};
use crate::{DeviceEnvironment, ExecutorError};
use op_timer::OpTimer;
use ops::{OpError, Ops};
use protocol::{DeviceKind, DeviceLibraries, ModelDtype};
use std::path::PathBuf;

/// Names of all ops that the benchmark can time, in the order in which it times them.
///
/// The model configuration determines which of these ops a model has: MLA ops exist for DeepSeek models,
/// expert ops for mixture-of-experts models.
pub const BENCH_OP_NAMES: &[&str] = &[
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "qkv_proj",
    "q_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj",
    "rope_kv_write",
    "attention_decode",
    "rope_attention_decode",
    "attention_prefill",
    "mla_decode",
    "mla_prefill",
    "o_proj",
    "gate_up_silu",
    "silu_mul",
    "down_proj",
    "router",
    "route_top_k",
    "experts",
    "shared_gate_up_silu",
    "shared_down_proj",
    "lm_head",
];

/// Device, shapes and sizes of an op benchmark.
#[derive(Debug, Clone)]
pub struct OpBenchConfig {
    /// Kind of the device that is measured.
    pub device: DeviceKind,
    /// Paths of the driver libraries; `None` = the system libraries.
    pub libraries: Option<DeviceLibraries>,
    /// Environment variables of GPU drivers.
    pub environment: DeviceEnvironment,
    /// Index of the GPU that is measured; unused on the CPU.
    pub gpu: u32,
    /// Folder in which compiled GPU kernels are cached.
    pub kernel_cache: Option<PathBuf>,
    /// Number of threads of the CPU device; `None` = one per physical core.
    pub threads: Option<u32>,
    /// Element type of weights and activations.
    pub dtype: ModelDtype,
    /// Model configuration that determines the shapes of the ops. No weights are read.
    pub model: models::ModelConfig,
    /// Numbers of tokens per launch; each op is measured once for each number.
    pub tokens: Vec<u32>,
    /// Number of keys that each row of a decode step attends to.
    pub context: u32,
    /// Number of tokens per KV block.
    pub block_tokens: u32,
    /// Number of timed runs per measurement.
    pub repeats: u32,
    /// Names of the ops to time; empty = all ops that the model has.
    pub only: Vec<String>,
}

/// Measured times of one op in one shape, and the minimum work (bytes and FLOPs) of one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct OpTiming {
    /// Name of the op, one of [`BENCH_OP_NAMES`].
    pub op: &'static str,
    /// Number of tokens per launch.
    pub tokens: u32,
    /// Sizes of the inputs and outputs as text.
    pub shape: String,
    /// Minimum bytes that one launch must read and write: weights, inputs, keys and values, outputs.
    pub bytes: u64,
    /// Number of floating-point operations in the matrix products of one launch.
    pub flops: u64,
    /// Seconds per launch, one entry per timed run.
    pub seconds: Vec<f64>,
}

/// An op benchmark: its configuration, and the opened device that it measures.
#[derive(Debug)]
pub struct OpBench {
    config: OpBenchConfig,
    ops: Ops,
    timer: OpTimer,
}

impl OpBench {
    /// Opens the device.
    ///
    /// Errors: the device cannot be opened, or has no kernels for the configured element type.
    pub fn open(config: OpBenchConfig) -> Result<Self, ExecutorError> {
        let OpenedDevice { backend, .. } = open_device::open_device(&DeviceOpenOptions {
            device: config.device,
            libraries: config.libraries.as_ref(),
            environment: &config.environment,
            gpu: config.gpu as usize,
            kernel_cache: config.kernel_cache.as_ref(),
            threads: config.threads.map(|threads| threads as usize),
            dtype: config.dtype,
        })?;
        let ops = Ops::new(backend, open_device::element_type(config.dtype))?;
        let timer = OpTimer::new(&ops, config.repeats)?;
        Ok(Self { config, ops, timer })
    }

    /// Name of the device.
    #[must_use]
    pub fn device_name(&self) -> String {
        self.ops.device().name()
    }

    /// Times every selected op that the model has, and passes each result to `report` as soon as it is
    /// measured.
    ///
    /// Errors: after an error, the benchmark cannot continue.
    pub fn run(&self, report: &mut dyn FnMut(OpTiming)) -> Result<(), ExecutorError> {
        let mut runner = OpBenchRunner { bench: self, report };
        dense_ops::time_before_attention(&mut runner)?;
        match self.config.model.mla {
            Some(mla) => mla_ops::time(&mut runner, &mla)?,
            None => attention_ops::time(&mut runner)?,
        }
        dense_ops::time_after_attention(&mut runner)?;
        if let Some(moe) = &self.config.model.moe {
            expert_ops::time(&mut runner, moe)?;
        }
        dense_ops::time_lm_head(&mut runner)
    }
}

/// Minimum work of one launch, for comparison with the memory bandwidth and peak FLOP/s of the device.
#[derive(Debug, Clone, Copy, Default)]
struct OpCost {
    /// Bytes that must be read and written.
    bytes: u64,
    /// Floating-point operations of the matrix products.
    flops: u64,
}

/// One op in one shape, to be timed.
#[derive(Debug)]
struct OpCase {
    op: &'static str,
    tokens: usize,
    shape: String,
    cost: OpCost,
    /// Number of copies of the weights or KV blocks: launch `i` reads copy `i % copies`.
    copies: usize,
}

/// Times ops and reports their times.
struct OpBenchRunner<'a> {
    bench: &'a OpBench,
    report: &'a mut dyn FnMut(OpTiming),
}

impl<'a> OpBenchRunner<'a> {
    fn config(&self) -> &'a OpBenchConfig {
        &self.bench.config
    }

    fn ops(&self) -> &'a Ops {
        &self.bench.ops
    }

    /// Bytes of one activation element.
    fn element_bytes(&self) -> usize {
        self.bench.ops.dtype().bytes()
    }

    /// Whether the configuration selects an op.
    fn is_selected(&self, op: &str) -> bool {
        let only = &self.bench.config.only;
        only.is_empty() || only.iter().any(|name| name == op)
    }

    /// Configured numbers of tokens per launch.
    fn token_counts(&self) -> impl Iterator<Item = usize> + use<> {
        self.bench.config.tokens.clone().into_iter().map(|tokens| tokens as usize)
    }

    /// Times one op in one shape. `launch(i)` launches the op once, with copy `i` of the weights or KV
    /// blocks.
    fn time(
        &mut self,
        case: OpCase,
        launch: &mut dyn FnMut(usize) -> Result<(), OpError>,
    ) -> Result<(), ExecutorError> {
        let OpCase { op, tokens, shape, cost: OpCost { bytes, flops }, copies } = case;
        // `interrupt_launch_order` makes the timed launches independent. Without it, each launch would
        // prefetch the weights of the next one, as the launches of successive layers do.
        let mut launch_alone = |i| {
            self.bench.ops.interrupt_launch_order();
            launch(i)
        };
        let seconds = self.bench.timer.time(&self.bench.ops, copies, &mut launch_alone)?;
        (self.report)(OpTiming { op, tokens: tokens as u32, shape, bytes, flops, seconds });
        Ok(())
    }
}
