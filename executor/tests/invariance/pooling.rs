//! Tests that the result of each pooling method is bit-identical alone, in a batch, in chunks, after
//! preemption and on all ranks, and that it belongs to the requested tokens.

use crate::scheduler_harness::{BLOCK, HarnessRequest, SchedulerHarness, VOCAB, config, shared};
use crate::{DTYPES, PROMPT, configs, name};
use executor::{ExecutorConfig, ModelDtype};
use models::ModelConfig;
use protocol::{PoolingMethod, SamplingParams};
use std::path::Path;

const TOKENS: [u32; 3] = [7, 0, VOCAB - 1];

fn methods() -> Vec<PoolingMethod> {
    use PoolingMethod::{LastToken, Mean, TokenLogprobs};
    vec![LastToken, Mean, TokenLogprobs(TOKENS.to_vec())]
}

fn rules_of(method: &PoolingMethod) -> SamplingParams {
    SamplingParams { pooling: Some(method.clone()), ..SamplingParams::greedy() }
}

/// Computes the rest of a prompt in chunks of `chunk` tokens and returns the pooled result.
fn pool(harness: &mut SchedulerHarness, request: &mut HarnessRequest, chunk: usize) -> Vec<f32> {
    while request.remaining() > 0 {
        assert!(request.pooled.is_empty(), "no result before the end of the prompt");
        let len = request.remaining().min(chunk);
        harness.step(&mut [request.chunk(len)]);
    }
    std::mem::take(&mut request.pooled)
}

fn pool_once(harness: &mut SchedulerHarness, method: &PoolingMethod, chunk: usize) -> Vec<f32> {
    let mut request = HarnessRequest::new(3, PROMPT, rules_of(method)).in_slot(chunk as u32 % 40);
    let pooled = pool(harness, &mut request, chunk);
    harness.free(request.table);
    pooled
}

/// A dense model with a classification head in place of the LM head.
fn classifier(dtype: ModelDtype) -> ExecutorConfig {
    let text = r#"{
        "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3",
        "vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 160, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": true, "attention_bias": false, "num_labels": 1
    }"#;
    let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
    ExecutorConfig { model, ..config(dtype, 2) }
}

#[test]
fn chunks_and_preemption_change_no_pooled_result() {
    for config in configs() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        for method in methods() {
            let expected = pool_once(&mut harness, &method, PROMPT);
            assert!(matches!(expected.len(), 3 | 64), "{name}, {method:?}");
            for chunk in [1, 7, 16, 64] {
                let found = pool_once(&mut harness, &method, chunk);
                assert_eq!(found, expected, "{name}, {method:?}, chunks of {chunk}");
            }
            let mut request = HarnessRequest::new(3, PROMPT, rules_of(&method));
            harness.step(&mut [request.chunk(21)]);
            let blocks = request.preempt(30);
            harness.free(blocks);
            let found = pool(&mut harness, &mut request, 33);
            assert_eq!(found, expected, "{name}, {method:?}, preempted");
            harness.free(request.table);
        }
    }
}

#[test]
fn batch_mates_change_no_pooled_result() {
    for config in configs() {
        let name = name(&config);
        let mut harness = SchedulerHarness::with(config);
        let expected: Vec<_> =
            methods().iter().map(|method| pool_once(&mut harness, method, PROMPT)).collect();
        // The steps contain requests of all pooling methods, six per method; the first three of these six
        // have the prompt of `expected`.
        let mut requests: Vec<HarnessRequest> = (0..18)
            .map(|i| {
                let id = if i < 3 { 3 } else { 100 + i };
                let len = if i < 3 { PROMPT } else { 5 + (i as usize * 13) % 60 };
                HarnessRequest::new(id, len, rules_of(&methods()[i as usize % 3])).in_slot(i as u32)
            })
            .collect();
        for turn in 0.. {
            let chunk = |i: usize| 1 + (i * 5 + turn * 11) % 30;
            let open = requests.iter_mut().enumerate().filter(|(_, r)| r.remaining() > 0);
            let mut rows: Vec<_> = open
                .map(|(i, request)| {
                    let len = request.remaining().min(chunk(i));
                    request.chunk(len)
                })
                .collect();
            if rows.is_empty() {
                break;
            }
            rows.sort_by_key(|chunk| chunk.len > 1);
            harness.step(&mut rows);
        }
        for (request, expected) in requests.iter().zip(&expected) {
            assert_eq!(&request.pooled, expected, "{name}");
        }
    }
}

#[test]
fn prefix_hit_changes_no_last_token() {
    let mut harness = SchedulerHarness::new(ModelDtype::Bfloat16, 2);
    let method = PoolingMethod::LastToken;
    let mut first = HarnessRequest::new(3, PROMPT, rules_of(&method));
    let expected = pool(&mut harness, &mut first, PROMPT);
    for blocks in 1..=PROMPT / BLOCK {
        let mut request = HarnessRequest::new(3, PROMPT, rules_of(&method)).in_slot(8);
        request.table = first.table.prefix(blocks);
        request.computed = blocks * BLOCK;
        assert_eq!(pool(&mut harness, &mut request, PROMPT), expected, "{blocks} blocks shared");
        harness.free(request.table.split_off(blocks));
    }
}

#[test]
fn mean_is_the_mean_of_the_last_tokens_of_all_prefixes() {
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 1);
    let last = |harness: &mut SchedulerHarness, len| {
        let mut request = HarnessRequest::new(3, len, rules_of(&PoolingMethod::LastToken));
        let pooled = pool(harness, &mut request, len);
        harness.free(request.table);
        pooled
    };
    let rows: Vec<Vec<f32>> = (1..=PROMPT).map(|len| last(&mut harness, len)).collect();
    let mean = pool_once(&mut harness, &PoolingMethod::Mean, 16);
    for (column, mean) in mean.iter().enumerate() {
        let sum: f64 = rows.iter().map(|row| f64::from(row[column])).sum();
        let difference = (sum / PROMPT as f64 - f64::from(*mean)).abs();
        assert!(difference < 1e-5, "column {column}: {difference}");
    }
}

#[test]
fn pooled_logprobs_equal_those_of_generation() {
    let mut harness = SchedulerHarness::new(ModelDtype::Float32, 2);
    let all = SamplingParams { logprobs: Some(u32::MAX), ..SamplingParams::greedy() };
    let mut request = HarnessRequest::new(3, PROMPT, all);
    harness.finish(&mut request, PROMPT, PROMPT + 1);
    let logprob = |token| {
        let mut entries = request.logprobs[0].top_logprobs.iter();
        entries.find(|entry| entry.0 == token).unwrap().1
    };
    let expected = TOKENS.map(logprob);
    let method = PoolingMethod::TokenLogprobs(TOKENS.to_vec());
    assert_eq!(pool_once(&mut harness, &method, PROMPT), expected);
}

#[test]
fn class_logit_is_the_same_in_chunks_and_near_for_ranks() {
    for dtype in DTYPES {
        let mut harness = SchedulerHarness::with(classifier(dtype));
        let expected = pool_once(&mut harness, &PoolingMethod::ClassLogits, PROMPT);
        assert!(expected.len() == 1 && expected[0] != 0.0, "{expected:?}");
        for chunk in [1, 7, 16] {
            let found = pool_once(&mut harness, &PoolingMethod::ClassLogits, chunk);
            assert_eq!(found, expected, "{dtype:?}, chunks of {chunk}");
        }
        if dtype == ModelDtype::Float32 {
            let mut ranks = SchedulerHarness::with(shared(classifier(dtype), 2, false));
            let found = pool_once(&mut ranks, &PoolingMethod::ClassLogits, 16);
            assert!((found[0] - expected[0]).abs() < 1e-5, "{found:?} {expected:?}");
        }
    }
}

/// Golden file with the pooling results of HF transformers for a model with synthetic weights.
struct GoldenPoolingResults(serde_json::Value);

impl GoldenPoolingResults {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden/pooling");
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        Self(serde_json::from_str(&text).unwrap())
    }

    /// Executor of the model in f32, with a classification head if `scores`.
    fn executor(&self, scores: bool) -> ExecutorConfig {
        let mut text = self.0["config"].as_str().unwrap().to_owned();
        if scores {
            text = text.replace("ForCausalLM", "ForSequenceClassification");
            text = text.replacen('{', "{\"num_labels\": 1, ", 1);
        }
        let model = ModelConfig::from_json(Path::new("config.json"), &text).unwrap();
        let mut executor = ExecutorConfig { model, ..config(ModelDtype::Float32, 2) };
        executor.settings.synth_seed = self.0["seed"].as_u64();
        executor
    }

    fn request(&self, len: usize, method: &PoolingMethod) -> HarnessRequest {
        let mut request = HarnessRequest::new(3, len, rules_of(method));
        let tokens = self.0["tokens"].as_array().unwrap()[..len].iter();
        request.tokens = tokens.map(|token| token.as_u64().unwrap() as u32).collect();
        request
    }

    /// Largest difference, over all prompts, between the result of `method` and the reference result stored
    /// under the key `name`, relative to the largest absolute value of the reference result.
    fn difference(&self, name: &str, method: &PoolingMethod) -> f64 {
        let scores = *method == PoolingMethod::ClassLogits;
        let mut harness = SchedulerHarness::with(self.executor(scores));
        let expected = self.0[name].as_array().unwrap();
        let mut most = 0.0f64;
        for (len, expected) in self.0["prompts"].as_array().unwrap().iter().zip(expected) {
            let mut request = self.request(len.as_u64().unwrap() as usize, method);
            let found = pool(&mut harness, &mut request, 64);
            harness.free(request.table);
            let expected: Vec<f64> =
                expected.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            assert_eq!(found.len(), expected.len(), "{name}");
            let scale = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                most = most.max((f64::from(*found) - expected).abs() / scale);
            }
        }
        most
    }
}

/// Tolerance of f32 results: terms are summed in a different order than in HF transformers.
const GOLDEN_TOLERANCE: f64 = 2e-4;

#[test]
fn pooled_results_match_transformers() {
    for model in ["qwen3", "llama"] {
        let golden = GoldenPoolingResults::read(model);
        let methods = [
            ("last", PoolingMethod::LastToken),
            ("mean", PoolingMethod::Mean),
            ("score", PoolingMethod::ClassLogits),
        ];
        for (name, method) in methods {
            let difference = golden.difference(name, &method);
            assert!(difference < GOLDEN_TOLERANCE, "{model}, {name}: {difference}");
        }
    }
}
