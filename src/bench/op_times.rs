//! `hadron bench ops`: measures each op of a model's layers on one device, and prints times and rates.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use executor::{BENCH_OP_NAMES, OpBench, OpBenchConfig, OpTiming};
use models::ModelConfig;
use models::config::CheckpointDType;
use protocol::DeviceKind;
use serde::Serialize;
use serde_json::{Map, json};

use super::report;
use super::samples::LatencySummary;
use crate::config::{BenchOpsArgs, DeviceArg, DtypeArg, ProcessEnvironment};
use crate::hub::{self, HubFileSet};
use crate::launcher::device_detection;

/// Model that provides the shapes if MODEL is not given.
const DEFAULT_NAME: &str = "Qwen3-0.6B";
const DEFAULT_CONFIG: &str = r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
    "tie_word_embeddings": true, "attention_bias": false, "torch_dtype": "bfloat16"}"#;

/// Results for one op at one number of tokens per launch.
#[derive(Debug, Serialize)]
struct OpTimeReport {
    op: &'static str,
    tokens: u32,
    shape: String,
    bytes: u64,
    flops: u64,
    /// Memory bandwidth at the median time, in GB/s.
    gb_per_s: f64,
    /// Arithmetic throughput at the median time, in GFLOP/s.
    gflop_per_s: f64,
    time_us: LatencySummary,
    fastest_us: f64,
}

/// Measures the ops that `args` selects and prints a table.
pub(super) fn run(args: &BenchOpsArgs, environment: &ProcessEnvironment) -> Result<ExitCode> {
    check(args)?;
    let model = model(args, environment)?;
    let name = args.model.as_deref().unwrap_or(DEFAULT_NAME);
    if model.quantization.is_some() {
        tracing::warn!("{name} is quantised; its shapes are measured with unquantised weights");
    }
    let config = bench_config(args, environment, model);
    let (dtype, kind) = (config.dtype, config.device);
    let bench = OpBench::open(config).with_context(|| {
        format!("cannot open the device ({kind:?}); select another one with --device")
    })?;
    let mut levels = Vec::new();
    bench.run(&mut |timing| {
        tracing::debug!(op = timing.op, tokens = timing.tokens, "op measured");
        levels.push(OpTimeReport::from_timing(timing));
    })?;
    if levels.is_empty() {
        bail!("{name} has none of the ops of --only");
    }
    levels.sort_by_key(|level| BENCH_OP_NAMES.iter().position(|name| *name == level.op));
    let device = bench.device_name();
    print(&levels)?;
    let dtype = format!("{dtype:?}").to_lowercase();
    let settings = json!({
        "model": name, "device": device, "dtype": dtype, "context": args.context,
        "block_size": args.block_size, "repeats": args.repeats,
    });
    tracing::info!(%device, model = name, dtype, "ops measured");
    report::write(args.output.as_deref(), &report::result("ops", &settings, &levels))?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &BenchOpsArgs) -> Result<()> {
    let positive = [args.context, args.block_size, args.repeats, args.threads.unwrap_or(1)];
    if args.tokens.contains(&0) || args.tokens.is_empty() || positive.contains(&0) {
        bail!("--tokens, --context, --block-size, --repeats and --threads: at least 1");
    }
    if !args.block_size.is_multiple_of(2) {
        bail!("--block-size {}: an even number of tokens", args.block_size);
    }
    match args.only.iter().find(|name| !BENCH_OP_NAMES.contains(&name.as_str())) {
        Some(name) => bail!("--only {name}: unknown op; known ops: {}", BENCH_OP_NAMES.join(", ")),
        None => Ok(()),
    }
}

/// Returns the configuration of the model whose layers provide the shapes of the measured ops.
fn model(args: &BenchOpsArgs, environment: &ProcessEnvironment) -> Result<ModelConfig> {
    let Some(name) = &args.model else {
        return Ok(ModelConfig::from_json(Path::new("config.json"), DEFAULT_CONFIG)?);
    };
    let dir = hub::resolve(name, None, HubFileSet::Config, environment, None)?;
    Ok(ModelConfig::from_dir_with(&dir, &Map::new())?)
}

fn model_dtype(arg: DtypeArg, checkpoint: Option<CheckpointDType>) -> executor::ModelDtype {
    match (arg, checkpoint) {
        (DtypeArg::Float32, _) | (DtypeArg::Auto, Some(CheckpointDType::F32)) => {
            executor::ModelDtype::Float32
        }
        (DtypeArg::Float16, _) | (DtypeArg::Auto, Some(CheckpointDType::F16)) => {
            executor::ModelDtype::Float16
        }
        (DtypeArg::Bfloat16 | DtypeArg::Auto, _) => executor::ModelDtype::Bfloat16,
    }
}

fn bench_config(
    args: &BenchOpsArgs,
    environment: &ProcessEnvironment,
    model: ModelConfig,
) -> OpBenchConfig {
    let kind = match args.device {
        DeviceArg::Auto => device_detection::detect(),
        kind => kind,
    };
    OpBenchConfig {
        device: match kind {
            DeviceArg::Auto | DeviceArg::Cpu => DeviceKind::Cpu,
            DeviceArg::Rocm => DeviceKind::Rocm,
            DeviceArg::Cuda => DeviceKind::Cuda,
        },
        libraries: args.device_libraries.clone(),
        environment: environment.devices.clone(),
        gpu: args.device_id,
        kernel_cache: environment.kernel_cache.clone(),
        threads: args.threads,
        dtype: model_dtype(args.dtype, model.dtype),
        model,
        tokens: args.tokens.clone(),
        context: args.context,
        block_tokens: args.block_size,
        repeats: args.repeats,
        only: args.only.clone(),
    }
}

impl OpTimeReport {
    fn from_timing(timing: OpTiming) -> Self {
        let OpTiming { op, tokens, shape, bytes, flops, seconds } = timing;
        let fastest_us = seconds.iter().copied().fold(f64::INFINITY, f64::min) * 1e6;
        // `from_seconds` converts seconds to milliseconds. Here its input is 1,000 times the seconds, so that
        // the result is in microseconds.
        let time_us = LatencySummary::from_seconds(seconds.into_iter().map(|s| s * 1e3).collect());
        let per_s = |count: u64| count as f64 / time_us.p50 / 1e3;
        let (gb_per_s, gflop_per_s) = (per_s(bytes), per_s(flops));
        Self { op, tokens, shape, bytes, flops, gb_per_s, gflop_per_s, time_us, fastest_us }
    }
}

fn print(levels: &[OpTimeReport]) -> Result<()> {
    let row = |level: &OpTimeReport| {
        vec![
            level.op.to_owned(),
            level.tokens.to_string(),
            level.shape.clone(),
            format!("{:.2}", level.time_us.p50),
            format!("{:.2}", level.fastest_us),
            format!("{:.3}", level.bytes as f64 / 1e6),
            format!("{:.1}", level.gb_per_s),
            format!("{:.1}", level.gflop_per_s),
        ]
    };
    let headings = ["op", "tokens", "shape", "µs median", "fastest", "MB", "GB/s", "GFLOP/s"];
    report::print_table(&headings, &levels.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_come_from_the_median_time() {
        let timing = OpTiming {
            op: "o_proj",
            tokens: 2,
            shape: String::new(),
            bytes: 3_000_000,
            flops: 12_000_000,
            seconds: vec![0.002, 0.001, 0.004],
        };
        let level = OpTimeReport::from_timing(timing);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        close(level.time_us.p50, 2000.0);
        close(level.fastest_us, 1000.0);
        close(level.gb_per_s, 1.5);
        close(level.gflop_per_s, 6.0);
    }

    #[test]
    fn default_shapes_are_a_valid_configuration() {
        let config = ModelConfig::from_json(Path::new("config.json"), DEFAULT_CONFIG).unwrap();
        assert_eq!((config.layers, config.vocab, config.head_dim), (28, 151_936, 128));
    }
}
