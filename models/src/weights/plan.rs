//! Which stored bytes fill which weight, decided before a byte of them is read.
//!
//! Coverage is exact in both directions: every stored tensor is consumed once or ignored by a rule
//! written here, and every weight of the table is filled once. Otherwise the folder is refused with
//! the list.

use super::checkpoint::Checkpoint;
use super::header::StoredDType;
use crate::error::TensorFault;
use crate::table::TensorSpec;
use crate::{Config, LoadError};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Stored tensors that carry nothing a model needs, by the end of their name.
const IGNORED: &[&str] = &[
    ".rotary_emb.inv_freq", // Old exports store what the configuration already says.
];

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The bytes of one weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Located {
    /// Stored tensor.
    pub(crate) stored: String,
    pub(crate) dtype: StoredDType,
    /// Bytes of the stored tensor; all of them unless experts are fused.
    pub(crate) bytes: Range<usize>,
}

/// Finds every weight, or says what does not fit.
pub(crate) fn locate(
    checkpoint: &Checkpoint,
    config: &Config,
    specs: &[TensorSpec],
) -> Result<BTreeMap<String, Located>, LoadError> {
    let mut located = BTreeMap::new();
    let mut missing = Vec::new();
    let mut used = BTreeSet::new();
    for spec in specs {
        let fused = Fused::of(spec, config).filter(|f| checkpoint.get(&f.name).is_some());
        let found = match (checkpoint.get(&spec.name).is_some(), fused) {
            (true, Some(fused)) => {
                let fault = TensorFault::StoredTwice(spec.name.clone());
                return Err(checkpoint.fault(&fused.name, fault));
            }
            (true, None) => whole(checkpoint, spec)?,
            (false, Some(fused)) => fused.part(checkpoint)?,
            (false, None) => {
                missing.push(spec.name.clone());
                continue;
            }
        };
        used.insert(found.stored.clone());
        located.insert(spec.name.clone(), found);
    }
    if config.tied && checkpoint.get(HEAD).is_some() {
        check_tied(checkpoint)?;
        used.insert(HEAD.to_owned());
    }
    let ignored = |name: &str| IGNORED.iter().any(|end| name.ends_with(end));
    let left_over = checkpoint.names().filter(|name| !used.contains(*name) && !ignored(name));
    let left_over: Vec<String> = left_over.map(str::to_owned).collect();
    if missing.is_empty() && left_over.is_empty() {
        return Ok(located);
    }
    Err(LoadError::Coverage { dir: checkpoint.dir.clone(), missing, left_over })
}

/// A weight stored under its own name.
fn whole(checkpoint: &Checkpoint, spec: &TensorSpec) -> Result<Located, LoadError> {
    let bytes = check(checkpoint, &spec.name, &spec.shape)?;
    Ok(Located { stored: spec.name.clone(), dtype: bytes.1, bytes: 0..bytes.0 })
}

/// Size in bytes and dtype of a stored tensor that must have `shape`.
fn check(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<(usize, StoredDType), LoadError> {
    let Some(stored) = checkpoint.get(name) else {
        return Err(checkpoint.fault(name, TensorFault::NotInFile));
    };
    if !matches!(stored.dtype, StoredDType::F32 | StoredDType::BF16 | StoredDType::F16) {
        let fault = TensorFault::WrongDType(stored.dtype.name());
        return Err(checkpoint.fault(name, fault));
    }
    if !stored.shape.iter().copied().eq(shape.iter().map(|d| *d as u64)) {
        let expected = shape.iter().map(|d| *d as u64).collect();
        let fault = TensorFault::Shape { found: stored.shape.clone(), expected };
        return Err(checkpoint.fault(name, fault));
    }
    Ok((stored.bytes.len(), stored.dtype))
}

/// The place of one expert's weight in a tensor that holds all experts of a layer.
struct Fused {
    name: String,
    shape: [usize; 3],
    /// Matrix of the fused tensor's first dimension.
    expert: usize,
    /// First row inside that matrix.
    row: usize,
    rows: usize,
}

impl Fused {
    /// `..experts.{e}.{gate,up,down}_proj.weight` as a part of `..experts.{gate_up,down}_proj`,
    /// whose shapes are `[E, 2 I, H]`, gate rows first, and `[E, H, I]`.
    fn of(spec: &TensorSpec, config: &Config) -> Option<Self> {
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

    fn part(&self, checkpoint: &Checkpoint) -> Result<Located, LoadError> {
        let (_, dtype) = check(checkpoint, &self.name, &self.shape)?;
        let [_, all_rows, cols] = self.shape;
        let row_bytes = cols * dtype.bytes() as usize;
        let start = (self.expert * all_rows + self.row) * row_bytes;
        let bytes = start..start + self.rows * row_bytes;
        Ok(Located { stored: self.name.clone(), dtype, bytes })
    }
}

/// A tied model may store its head a second time, if it is the same.
fn check_tied(checkpoint: &Checkpoint) -> Result<(), LoadError> {
    let head = checkpoint.get(HEAD).map(|t| (t.dtype, &t.shape));
    let embedding = checkpoint.get(EMBEDDING).map(|t| (t.dtype, &t.shape));
    if head == embedding && checkpoint.bytes(HEAD) == checkpoint.bytes(EMBEDDING) {
        return Ok(());
    }
    Err(checkpoint.fault(HEAD, TensorFault::TiedHead))
}
