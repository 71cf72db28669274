//! Which stored bytes fill which weight, decided before a byte of them is read.
//!
//! Coverage is exact in both directions: every stored tensor is consumed once or ignored by a rule
//! written here, and every weight of the table is filled once. Otherwise the folder is refused with
//! the list.

use super::checkpoint::SafetensorsCheckpoint;
use super::header::StoredDType;
use crate::error::TensorFault;
use crate::synth::SynthValues;
use crate::weight_table::{EMBEDDING, HEAD, TensorSpec, mtp_copies};
use crate::{ModelConfig, ModelLoadError};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Stored tensors that carry nothing a model needs, by the end of their name.
const IGNORED: &[&str] = &[
    ".rotary_emb.inv_freq", // Old exports store what the configuration already says.
];
/// What a checkpoint that drafts for another model stores beside: of each id, whether it can be drafted.
const TARGET_TO_DRAFT: &str = "t2d";
/// Factors of keys and values, by the end of their name: read where the cache is quantised.
const CACHE_SCALES: &[&str] = &[".k_scale", ".v_scale"];

/// The bytes of one weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocatedWeight {
    /// Stored tensor.
    pub(crate) stored: String,
    pub(crate) dtype: StoredDType,
    /// Bytes of the stored tensor; all of them unless experts are fused.
    pub(crate) bytes: Range<usize>,
    /// Stored tensor of its scales, if it is quantised.
    pub(crate) scales: Option<String>,
}

/// Finds every weight, or says what does not fit.
pub(crate) fn locate(
    checkpoint: &SafetensorsCheckpoint,
    config: &ModelConfig,
    specs: &[TensorSpec],
) -> Result<BTreeMap<String, LocatedWeight>, ModelLoadError> {
    let mut located = BTreeMap::new();
    let mut missing = Vec::new();
    let mut used = BTreeSet::new();
    for spec in specs {
        let fused =
            FusedExpertWeight::of(spec, config).filter(|f| checkpoint.get(&f.name).is_some());
        let found = match (checkpoint.get(&spec.name).is_some(), fused) {
            (true, Some(fused)) => {
                let fault = TensorFault::StoredTwice(spec.name.clone());
                return Err(checkpoint.fault(&fused.name, fault));
            }
            (true, None) => whole(checkpoint, spec)?,
            (false, Some(fused)) => fused.part(checkpoint)?,
            (false, None) if spec.optional => continue,
            (false, None) => {
                missing.push(spec.name.clone());
                continue;
            }
        };
        used.insert(found.stored.clone());
        if let Some(scales) = &found.scales {
            if checkpoint.get(scales).is_none() {
                missing.push(scales.clone());
                continue;
            }
            check_scales(checkpoint, spec, scales)?;
            used.insert(scales.clone());
        }
        located.insert(spec.name.clone(), found);
    }
    if config.tied && checkpoint.get(HEAD).is_some() {
        check_same(checkpoint, HEAD, EMBEDDING, TensorFault::TiedHead)?;
        used.insert(HEAD.to_owned());
    }
    for (copy, of) in if config.load_mtp { mtp_copies(config) } else { Vec::new() } {
        if checkpoint.get(&copy).is_some() {
            check_same(checkpoint, &copy, of, TensorFault::Copy(of))?;
            used.insert(copy);
        }
    }
    let ends = |name: &str| IGNORED.iter().chain(CACHE_SCALES).any(|end| name.ends_with(end));
    let marks = |name: &str| config.eagle.is_some() && name == TARGET_TO_DRAFT;
    let ignored = |name: &str| ends(name) || is_draft(name, config) || marks(name);
    let left_over = checkpoint.names().filter(|name| !used.contains(*name) && !ignored(name));
    let left_over: Vec<String> = left_over.map(str::to_owned).collect();
    if missing.is_empty() && left_over.is_empty() {
        return Ok(located);
    }
    Err(ModelLoadError::Coverage { dir: checkpoint.dir.clone(), missing, left_over })
}

/// Whether it belongs to a draft layer that is not read.
fn is_draft(name: &str, config: &ModelConfig) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
    let layer: Option<usize> = layer.and_then(|layer| layer.parse().ok());
    let drafts = config.kv_layers()..config.layers + config.mtp_layers;
    layer.is_some_and(|layer| drafts.contains(&layer))
}

/// A weight stored under its own name. What is stored decides whether it is quantised.
fn whole(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
) -> Result<LocatedWeight, ModelLoadError> {
    let scales = spec.scales.as_ref();
    let may_be = match spec.values {
        SynthValues::Offsets => AllowedDType::DraftToTarget,
        _ if scales.is_some() => AllowedDType::Fp8,
        _ => AllowedDType::Float,
    };
    let (bytes, dtype) = check(checkpoint, &spec.name, &spec.shape, may_be)?;
    let scales = scales.filter(|_| dtype == StoredDType::F8E4M3).map(|s| s.name.clone());
    Ok(LocatedWeight { stored: spec.name.clone(), dtype, bytes: 0..bytes, scales })
}

/// What a stored tensor may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AllowedDType {
    /// Of a float type that is computed in.
    Float,
    /// Such a type, or fp8.
    Fp8,
    /// 64-bit whole numbers.
    DraftToTarget,
}

/// Size in bytes and dtype of a stored tensor that must have `shape`.
fn check(
    checkpoint: &SafetensorsCheckpoint,
    name: &str,
    shape: &[usize],
    may_be: AllowedDType,
) -> Result<(usize, StoredDType), ModelLoadError> {
    let Some(stored) = checkpoint.get(name) else {
        return Err(checkpoint.fault(name, TensorFault::NotInFile));
    };
    let float = matches!(stored.dtype, StoredDType::F32 | StoredDType::BF16 | StoredDType::F16);
    let fp8 = may_be == AllowedDType::Fp8 && stored.dtype == StoredDType::F8E4M3;
    let fault = match may_be {
        AllowedDType::DraftToTarget if stored.dtype == StoredDType::I64 => None,
        AllowedDType::DraftToTarget => Some(TensorFault::OffsetDType(stored.dtype.name())),
        _ if float || fp8 => None,
        _ => Some(TensorFault::WrongDType(stored.dtype.name())),
    };
    if let Some(fault) = fault {
        return Err(checkpoint.fault(name, fault));
    }
    if !stored.shape.iter().copied().eq(shape.iter().map(|d| *d as u64)) {
        let expected = shape.iter().map(|d| *d as u64).collect();
        let fault = TensorFault::Shape { found: stored.shape.clone(), expected };
        return Err(checkpoint.fault(name, fault));
    }
    Ok((stored.bytes.len(), stored.dtype))
}

/// Scales of rows may be stored with or without their one column.
fn check_scales(
    checkpoint: &SafetensorsCheckpoint,
    spec: &TensorSpec,
    name: &str,
) -> Result<(), ModelLoadError> {
    let Some(grid) = spec.scales.as_ref().map(|s| s.grid) else { return Ok(()) };
    let [rows, cols] = spec.scale_shape(grid);
    let flat = checkpoint.get(name).is_some_and(|stored| stored.shape.len() == 1) && cols == 1;
    let shape = [rows, cols];
    check(checkpoint, name, &shape[..if flat { 1 } else { 2 }], AllowedDType::Float).map(drop)
}

/// The place of one expert's weight in a tensor that holds all experts of a layer.
struct FusedExpertWeight {
    name: String,
    shape: [usize; 3],
    /// Matrix of the fused tensor's first dimension.
    expert: usize,
    /// First row inside that matrix.
    row: usize,
    rows: usize,
}

impl FusedExpertWeight {
    /// `..experts.{e}.{gate,up,down}_proj.weight` as a part of `..experts.{gate_up,down}_proj`,
    /// whose shapes are `[E, 2 I, H]`, gate rows first, and `[E, H, I]`.
    fn of(spec: &TensorSpec, config: &ModelConfig) -> Option<Self> {
        let moe = config.moe.as_ref()?;
        let (layer, rest) = spec.name.split_once(".experts.")?;
        let (expert, weight) = rest.split_once('.')?;
        let expert = expert.parse().ok()?;
        let [rows, cols] = spec.matrix();
        let (fused, all_rows, row) = match weight {
            "gate_proj.weight" => ("gate_up_proj", 2 * rows, 0),
            "up_proj.weight" => ("gate_up_proj", 2 * rows, rows),
            "down_proj.weight" => ("down_proj", rows, 0),
            _ => return None,
        };
        let name = format!("{layer}.experts.{fused}");
        Some(Self { name, shape: [moe.experts, all_rows, cols], expert, row, rows })
    }

    fn part(&self, checkpoint: &SafetensorsCheckpoint) -> Result<LocatedWeight, ModelLoadError> {
        let (_, dtype) = check(checkpoint, &self.name, &self.shape, AllowedDType::Float)?;
        let [_, all_rows, cols] = self.shape;
        let row_bytes = cols * dtype.bytes() as usize;
        let start = (self.expert * all_rows + self.row) * row_bytes;
        let bytes = start..start + self.rows * row_bytes;
        Ok(LocatedWeight { stored: self.name.clone(), dtype, bytes, scales: None })
    }
}

/// What is stored a second time must be the same.
fn check_same(
    checkpoint: &SafetensorsCheckpoint,
    copy: &str,
    of: &str,
    fault: TensorFault,
) -> Result<(), ModelLoadError> {
    let [a, b] = [copy, of].map(|name| checkpoint.get(name).map(|t| (t.dtype, &t.shape)));
    if a == b && checkpoint.bytes(copy) == checkpoint.bytes(of) {
        return Ok(());
    }
    Err(checkpoint.fault(copy, fault))
}
