//! Settings of the executors.

use super::super::model_files::ModelFiles;
use super::{device, parallel};
use crate::config::{
    BF16_KV_CACHE_MISMATCH, EngineArgs, KvCacheDtypeArg, ProcessEnvironment, ServeArgs,
};
use anyhow::{Context, Result, anyhow, bail};
use executor::{ExecutorConfig, GPU_LOGPROBS_MAX, KvCacheSize};
use models::ModelConfig;
use protocol::{
    DeviceKind, Epoch, ExecutorSettings, ExpertPlacement, GraphCaptureConfig, ParallelConfig, Rank,
    SpeculativeMethod,
};
use std::fs;

/// Returns an error if the model cannot be served with the parallel configuration or on the kind of device. The error
/// message contains the conflicting numbers.
pub fn check_world(args: &ServeArgs, files: &ModelFiles) -> Result<()> {
    let (model, draft) = (&files.config, files.draft.as_ref().map(|(_, config)| config));
    let parallel = parallel(args);
    let ParallelConfig { tp_size, dp_size, .. } = parallel;
    if let (Some(cluster), Some(_)) = (args.nodes.cluster(), draft) {
        let flag = args.speculation.flag_in_error();
        bail!("{flag}: draft checkpoints are supported on one node only, not on {}", cluster.nodes);
    }
    if let Some(draft) = draft {
        let checked = executor::check_draft_world(parallel, draft);
        checked.with_context(|| format!("{}: draft model", args.speculation.flag_in_error()))?;
    }
    let speculation = args.speculation.speculation();
    if let (Some(_), Some(_)) = (&files.pooling, speculation) {
        let flag = args.speculation.flag_in_error();
        bail!("{flag}: draft tokens are for text generation, not for --runner pooling");
    }
    let load_mtp =
        speculation.is_some_and(|speculation| speculation.method == SpeculativeMethod::Mtp);
    let model = &ModelConfig { load_mtp, ..model.clone() };
    let expert_placement = expert_placement(args)?;
    let checked = executor::check_world(parallel, model, expert_placement.as_ref());
    checked.with_context(|| {
        let file = args.parallel.expert_placement.as_ref();
        let placement_flag =
            file.map_or(String::new(), |file| format!(", --expert-placement {}", file.display()));
        format!("--tensor-parallel-size {tp_size}, --data-parallel-size {dp_size}{placement_flag}")
    })?;
    executor::check_sampler(device(args.engine.device), parallel, model)?;
    let checked = executor::check_speculation(speculation, model, draft);
    checked.map_err(|error| anyhow!("{}: {error}", args.speculation.flag_in_error()))
}

/// Returns the number of ranks that run on each node.
fn host_ranks(args: &ServeArgs) -> u16 {
    parallel(args).world_size() / args.nodes.cluster().map_or(1, |cluster| cluster.nodes)
}

/// Returns the name or address of this node, if ranks that step together are on several nodes.
fn host_address(args: &ServeArgs) -> Option<String> {
    let cluster = args.nodes.cluster()?;
    let spans_nodes = parallel(args).ranks_per_group() > host_ranks(args);
    let address = || cluster.node_address.clone().unwrap_or_else(|| cluster.host.clone());
    spans_nodes.then(address)
}

/// Content of the `--expert-placement` file (EPLB map), in the format of SGLang's `--init-expert-location`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpertPlacementFile {
    physical_to_logical_map: Vec<Vec<serde_json::Number>>,
}

/// Reads the expert placement; `None` = no file is given.
///
/// Errors: the file cannot be read or parsed.
fn expert_placement(args: &ServeArgs) -> Result<Option<ExpertPlacement>> {
    let Some(file) = &args.parallel.expert_placement else { return Ok(None) };
    let location = || format!("--expert-placement {}", file.display());
    let text = fs::read_to_string(file).with_context(location)?;
    let ExpertPlacementFile { physical_to_logical_map } =
        serde_json::from_str(&text).with_context(location)?;
    let layer = |(layer, experts): (usize, Vec<serde_json::Number>)| -> Result<Vec<u16>> {
        let number = |(index, number): (usize, &serde_json::Number)| {
            let expert = number.as_u64().and_then(|expert| u16::try_from(expert).ok());
            expert.with_context(|| {
                format!(
                    "layer {layer}: physical expert {index} is {number}, which is not an expert id"
                )
            })
        };
        experts.iter().enumerate().map(number).collect()
    };
    let layers: Result<_> = physical_to_logical_map.into_iter().enumerate().map(layer).collect();
    Ok(Some(ExpertPlacement { layers: layers.with_context(location)? }))
}

/// Returns the number of threads of a CPU rank, or of host threads of a GPU rank; `None` = the executor's
/// default. Without `--threads`, several ranks of a node share its cores equally.
fn threads(args: &ServeArgs) -> Option<u32> {
    let ranks = usize::from(host_ranks(args));
    let shared = (ranks > 1).then(|| (executor::physical_cores() / ranks).max(1));
    args.engine.threads.or(shared).map(|threads| threads as u32)
}

/// Rejects a data type of the KV cache that does not match the data type of the model, which is known only
/// after the checkpoint has been read.
fn check_cache(args: &ServeArgs, dtype: executor::ModelDtype) -> Result<()> {
    let cache = args.engine.kv_cache_dtype;
    if cache == KvCacheDtypeArg::Bf16 && dtype != executor::ModelDtype::Bfloat16 {
        bail!(BF16_KV_CACHE_MISMATCH);
    }
    Ok(())
}

/// Returns the configuration of the executors.
///
/// Errors: the data type of the KV cache does not match that of the model; `--max-logprobs` exceeds the limit
/// of a GPU; config overrides cannot be serialised.
pub fn executor(
    args: &ServeArgs,
    files: &ModelFiles,
    environment: &ProcessEnvironment,
) -> Result<ExecutorConfig> {
    let (engine, device) = (&args.engine, device(args.engine.device));
    let dtype = files.dtype(args.model.dtype);
    check_cache(args, dtype)?;
    let settings = ExecutorSettings {
        model_dir: files.dir.clone(),
        draft_model_dir: files.draft.as_ref().map(|(dir, _)| dir.clone()),
        config_overrides: Some(serde_json::to_string(&args.model.config_overrides())?),
        synth_seed: match files.source {
            models::LoadFormat::Synth { seed } => Some(seed),
            models::LoadFormat::Safetensors => None,
        },
        device,
        gpus: gpu_indices(args)?,
        libraries: engine.device_libraries.clone(),
        kernel_cache: environment.kernel_cache.clone(),
        dtype,
        kv_cache_dtype: match engine.kv_cache_dtype {
            KvCacheDtypeArg::Fp8 => executor::KvCacheDtype::Fp8,
            KvCacheDtypeArg::Auto | KvCacheDtypeArg::Bf16 => executor::KvCacheDtype::Auto,
        },
        threads: threads(args),
        block_tokens: engine.block_size,
        max_model_len: files.max_model_len,
        // Without `--max-model-len`, the scheduler reduces the maximum length to what fits in the KV cache.
        kv_tokens_min: args.model.max_model_len.tokens().unwrap_or(engine.block_size),
        max_num_seqs: engine.max_num_seqs(),
        tokens_per_step: engine.tokens_per_step(),
        kv_cache_size: match (engine.num_gpu_blocks_override, engine.kv_cache_memory_bytes) {
            (Some(blocks), _) => KvCacheSize::Blocks(blocks),
            (None, Some(bytes)) => KvCacheSize::Bytes(bytes.0),
            (None, None) => KvCacheSize::Auto,
        },
        memory_utilization: engine.gpu_memory_utilization,
        // Pooling requests have no decode steps, for which graphs are captured.
        graph_capture: match &files.pooling {
            Some(_) => GraphCaptureConfig::Disabled,
            None => graph_capture(engine),
        },
        speculative: args.speculation.speculation(),
        max_logprobs: logprobs_max(device, args.reply.max_logprobs, files.config.vocab as u32)?,
        profile_dir: engine.profile.clone(),
        epoch: Epoch(1), // First epoch of the engine's executor groups.
        rank: Rank(0),
        parallel: parallel(args),
        ranks_on_host: host_ranks(args),
        expert_placement: expert_placement(args)?,
        host_address: host_address(args),
        rendezvous: None,
        one_shot_all_reduce: !args.parallel.disable_custom_all_reduce,
    };
    let draft = files.draft.as_ref().map(|(_, config)| config.clone());
    Ok(ExecutorConfig {
        settings,
        environment: environment.devices.clone(),
        model: files.config.clone(),
        draft,
        manifest: files.manifest,
    })
}

/// Returns the settings by which graphs of decode steps are captured.
fn graph_capture(engine: &EngineArgs) -> GraphCaptureConfig {
    let sizes = &engine.cudagraph_capture_sizes;
    match (engine.enforce_eager, sizes.is_empty()) {
        (true, _) => GraphCaptureConfig::Disabled,
        (false, true) => {
            GraphCaptureConfig::DefaultSizes { max_size: engine.max_cudagraph_capture_size }
        }
        (false, false) => GraphCaptureConfig::Sizes(sizes.clone()),
    }
}

/// Returns the GPU index of each rank of this node; empty if `--device-ids` is not given.
fn gpu_indices(args: &ServeArgs) -> Result<Vec<u32>> {
    let (ids, ranks) = (&args.engine.device_ids, usize::from(host_ranks(args)));
    match (ids.len(), device(args.engine.device)) {
        (0, _) => {}
        (_, DeviceKind::Cpu) => bail!("--device-ids: the executors run on the CPU"),
        (count, _) if count != ranks => {
            bail!(
                "--device-ids lists {count} GPUs, but {ranks} executors of this node need one each"
            )
        }
        _ => {}
    }
    Ok(ids.clone())
}

/// Returns the upper limit of a request's number of log-probabilities. `requested` −1 = the maximum that the
/// device supports.
fn logprobs_max(device: DeviceKind, requested: i64, vocab: u32) -> Result<u32> {
    let max = match device {
        DeviceKind::Cpu => vocab,
        DeviceKind::Rocm | DeviceKind::Cuda => vocab.min(GPU_LOGPROBS_MAX),
    };
    if requested > i64::from(max) && max < vocab {
        bail!(
            "--max-logprobs {requested}: a GPU reports at most {max} of the {vocab} ids of the \
             vocabulary per token; -1 selects this maximum"
        );
    }
    Ok(u32::try_from(requested).unwrap_or(max).min(max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_logprobs_are_capped_below_the_vocabulary() {
        let max =
            |device, requested| logprobs_max(device, requested, 151_936).map_err(|e| e.to_string());
        assert_eq!(max(DeviceKind::Cpu, -1), Ok(151_936));
        assert_eq!(max(DeviceKind::Cpu, 200_000), Ok(151_936));
        assert_eq!((max(DeviceKind::Cuda, 20), max(DeviceKind::Rocm, 0)), (Ok(20), Ok(0)));
        assert_eq!(max(DeviceKind::Cuda, -1), Ok(1024));
        let error = max(DeviceKind::Rocm, 2000).unwrap_err();
        for part in ["--max-logprobs 2000", "at most 1024", "151936 ids"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(
            logprobs_max(DeviceKind::Cuda, 2000, 300).ok(),
            Some(300),
            "the whole vocabulary is reported"
        );
    }
}
