//! Loads FP8 checkpoints that quantisation tools wrote (`quantize.py`). The logits must match two references:
//! transformers with dequantised weights (stored weights times scales), and the tools' own models, which also
//! quantise activations.

use ops::DType;

use crate::LOGIT_TOLERANCE;
use crate::fixture::QuantizedCheckpointFixture;
use crate::model_harness::{ModelHarness, RankContext, SequenceRow, closeness, difference};

/// Maximum errors relative to models with quantised activations, for the fields `mean`, `p99` and `regret` of
/// `LogprobErrors`. Quantised activations have a relative error of up to 1/16. Largest measured differences
/// between transformers with and without quantised activations: mean 0.13, 99th percentile 0.45. transformers in
/// bf16 with quantised activations and an unquantised KV cache has a regret of 0.55 on
/// `llm_compressor-static-kv`, whose tool also quantises the cache.
const ACTIVATION_GATE: [f32; 3] = [0.16, 0.60, 0.60];

const CHECKPOINTS: [&str; 4] = [
    "llm_compressor-static-kv",
    "llm_compressor-groups",
    "llm_compressor-block-heads",
    "modelopt-kv",
];

fn logits(checkpoint: &QuantizedCheckpointFixture, dtypes: [DType; 2]) -> Vec<Vec<f32>> {
    let rank_context = RankContext::single();
    let mut harness = ModelHarness::from_folder(&rank_context, &checkpoint.dir, dtypes);
    let row = SequenceRow::new(&mut harness, &checkpoint.tokens);
    harness.run(&[&row])
}

#[test]
fn stored_weights_and_scales_match_transformers() {
    for name in CHECKPOINTS {
        let checkpoint = QuantizedCheckpointFixture::read(name);
        let found = logits(&checkpoint, [DType::F32; 2]);
        assert_eq!(found.len(), checkpoint.weights.len());
        let worst = difference(&found, &checkpoint.weights);
        println!("{name}: {worst}");
        assert!(worst <= LOGIT_TOLERANCE, "{name}: logits differ by {worst}");
    }
}

#[test]
fn quantized_activations_and_caches_are_close_to_the_tool() {
    for name in CHECKPOINTS {
        let checkpoint = QuantizedCheckpointFixture::read(name);
        for kv_dtype in [DType::BF16, DType::F8E4M3] {
            let found = logits(&checkpoint, [DType::BF16, kv_dtype]);
            let errors = closeness(&found, &checkpoint.quantized);
            println!("{name} {kv_dtype:?} {errors:?}");
            let [mean, p99, regret] = ACTIVATION_GATE;
            let close = errors.mean <= mean && errors.p99 <= p99 && errors.regret <= regret;
            assert!(close, "{name} {kv_dtype:?}: {errors:?}");
        }
    }
}
