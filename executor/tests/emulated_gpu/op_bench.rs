//! Tests of the op benchmark on an emulated GPU, where launches are captured once and replayed.

use super::emulated_gpu;
use executor::{OpBench, OpBenchConfig, OpTiming};
use models::config::ModelConfig;
use protocol::{DeviceKind, DeviceLibraries, ModelDtype};
use std::path::Path;

/// Configuration of a model that is small enough for the emulator.
const MODEL: &str = r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64,
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "intermediate_size": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": true,
    "attention_bias": false, "torch_dtype": "float32"}"#;

#[test]
fn ops_of_a_gpu_are_timed_in_captured_graphs() {
    let libraries = DeviceLibraries {
        driver: emulated_gpu::library(),
        compiler: None,
        blas: None,
        emulated_warp_size: Some(64),
        collectives: None,
    };
    let config = OpBenchConfig {
        device: DeviceKind::Rocm,
        libraries: Some(libraries),
        environment: executor::DeviceEnvironment::default(),
        gpu: 0,
        kernel_cache: Some(emulated_gpu::kernel_cache()),
        threads: None,
        dtype: ModelDtype::Float32,
        model: ModelConfig::from_json(Path::new("config.json"), MODEL).unwrap(),
        tokens: vec![1, 2],
        context: 4,
        block_tokens: 4,
        repeats: 2,
        only: ["add_rms_norm", "o_proj"].map(str::to_owned).to_vec(),
    };
    let mut timings: Vec<OpTiming> = Vec::new();
    let bench = OpBench::open(config).unwrap();
    assert!(bench.device_name().contains("emulat"), "{}", bench.device_name());
    bench.run(&mut |timing| timings.push(timing)).unwrap();
    assert_eq!(timings.len(), 2 * 2, "{timings:?}");
    for timing in timings {
        assert_eq!(timing.seconds.len(), 2, "{timing:?}");
        assert!(timing.seconds.iter().all(|s| *s > 0.0), "{timing:?}");
    }
}
