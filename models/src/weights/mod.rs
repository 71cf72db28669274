//! Weight loading: weights are located, checked, sliced for this rank, converted, and provided to layers by
//! name.
//!
//! A layer calls, for example, `w.at("self_attn").linear(&["q_proj", "k_proj", "v_proj"], true)`. The call
//! does not depend on the stored format or on the rank's slice. Each weight must be loaded exactly once;
//! `finish` returns an error if a weight has not been loaded.

mod checkpoint;
mod delta_weights;
mod digest;
mod digest_workers;
mod expert_weights;
mod fused_weight;
mod header;
mod mxfp4;
mod rotary_rows;
mod scale_plan;
mod source;
mod stored_names;
mod synth_shard;
mod tensor_plan;
#[cfg(test)]
mod tests;

pub use checkpoint::tensor_locations;
pub(crate) use checkpoint::weight_files;
pub(crate) use digest::WeightLoadObserver;
pub(crate) use fused_weight::FusedWeightLocation;
pub(crate) use mxfp4::{BLOCKS, GROUP_BYTES, SCALES};
pub(crate) use rotary_rows::{RotaryPairKind, RotaryRowOrder};
pub(crate) use source::WeightSource;
pub(crate) use stored_names::{
    LANGUAGE_MODEL, MODEL_LANGUAGE_MODEL, TensorNameReplacement, family_name, spelling,
};

use crate::config::{KvProjectionKind, NormWeightKind};
use crate::expert_placement::check_placement;
use crate::sharding::{ParallelRank, ParallelRanks, UnevenSplitError, WeightSlice};
use crate::weight_table::{TensorSpec, tensors};
use crate::{KvGrouping, KvLayerIndex, ModelConfig, ModelLoadError};
use expert_weights::local_experts;
use ops::{DType, HostMat, OpError, Ops, PackedLinear, PackedMlaUpProjections, Tensor};
use protocol::ExpertPlacement;
use source::HostWeightShard;
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::rc::Rc;

/// Names of the QKV projections, in the order in which their rows are stacked.
pub(crate) const QKV_PROJECTIONS: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

/// Callback that is called with the number of bytes loaded so far and the total number of bytes.
pub type LoadProgressCallback<'a> = &'a mut dyn FnMut(u64, u64);

/// Access to the weights whose names have a common prefix.
#[derive(Clone)]
pub struct Weights<'a> {
    store: Rc<WeightStore<'a>>,
    path: String,
}

/// Device, rank and KV cache settings for which weights are loaded.
#[derive(Clone, Copy)]
pub(crate) struct WeightLoadTarget<'a> {
    /// Ops of the device on which weights are stored.
    pub(crate) ops: &'a Ops,
    /// Indices of this rank on the tensor-parallel and expert-parallel axes.
    pub(crate) ranks: ParallelRanks,
    /// Expert placement; `None` = each expert has one copy, in ascending order of experts.
    pub(crate) placement: Option<&'a ExpertPlacement>,
    /// Dtype of the KV cache.
    pub(crate) kv_dtype: DType,
    /// Assignment of the layers to KV groups.
    pub(crate) kv_grouping: &'a KvGrouping,
    /// Number of positions in the RoPE tables: the longest context that requests can use, in tokens.
    pub(crate) positions: usize,
}

/// Weights of a model while it is loaded, including the set of weights that have not been loaded yet.
struct WeightStore<'a> {
    config: &'a ModelConfig,
    source: WeightSource,
    ops: &'a Ops,
    ranks: ParallelRanks,
    placement: Option<&'a ExpertPlacement>,
    kv_dtype: DType,
    kv_grouping: &'a KvGrouping,
    positions: usize,
    untaken: RefCell<BTreeMap<String, TensorSpec>>,
    observer: RefCell<WeightLoadObserver<'a>>,
    bytes_done: Cell<u64>,
    bytes_total: u64,
}

impl WeightStore<'_> {
    /// Loads this rank's part of the weight `name` into host memory, and marks the weight as loaded.
    ///
    /// Errors: the weight has already been loaded, or is not in the weight table.
    fn take(&self, name: &str) -> Result<HostWeightShard<'_>, ModelLoadError> {
        let table = |what| ModelLoadError::table(name, what);
        let spec = self.untaken.borrow_mut().remove(name);
        let spec = spec.ok_or_else(|| table("is unknown or read twice"))?;
        let slice = split(&spec, self.config, &self.ranks)?;
        let done = self.bytes_done.get() + self.source.bytes(&spec, &slice);
        let part = self.source.part(&spec, slice.clone())?;
        self.bytes_done.set(done);
        let observer = &mut *self.observer.borrow_mut();
        observer.add(&self.source, &spec, &slice, &part);
        (observer.progress)(done, self.bytes_total);
        Ok(part)
    }
}

impl<'a> Weights<'a> {
    /// Creates access to all weights, after checking that every weight of the weight table can be split over
    /// the ranks. Only the samples for the digest are read from the checkpoint.
    pub(crate) fn new(
        config: &'a ModelConfig,
        source: WeightSource,
        target: WeightLoadTarget<'a>,
        observer: WeightLoadObserver<'a>,
    ) -> Result<Self, ModelLoadError> {
        let WeightLoadTarget { ops, ranks, placement, kv_dtype, kv_grouping, positions } = target;
        let mut untaken = BTreeMap::new();
        let mut bytes_total = 0;
        for spec in tensors(config) {
            let slice = split(&spec, config, &ranks)?;
            if !belongs_to_other_rank(&spec, config, &ranks, placement) {
                bytes_total += source.bytes(&spec, &slice);
            }
            untaken.insert(spec.name.clone(), spec);
        }
        if let WeightSource::Files { checkpoint, .. } = &source {
            digest::add_samples(observer.digest, checkpoint);
        }
        let (untaken, observer) = (RefCell::new(untaken), RefCell::new(observer));
        let bytes_done = Cell::new(0);
        let store = WeightStore {
            config,
            source,
            ops,
            ranks,
            placement,
            kv_dtype,
            kv_grouping,
            positions,
            untaken,
            observer,
            bytes_done,
            bytes_total,
        };
        Ok(Self { store: Rc::new(store), path: String::new() })
    }

    /// Waits until the digest is complete.
    ///
    /// Errors: a weight has not been loaded.
    pub(crate) fn finish(&self) -> Result<(), ModelLoadError> {
        if let Some(tensor) = self.store.untaken.borrow().keys().next() {
            return Err(ModelLoadError::table(tensor, "was not read"));
        }
        self.store.observer.borrow_mut().finish();
        Ok(())
    }

    /// Returns access to the weights whose names start with the current prefix followed by `child`.
    #[must_use]
    pub fn at(&self, child: impl Display) -> Self {
        Self { store: self.store.clone(), path: self.name(child) }
    }

    /// Returns access to the weights of decoder layer `layer`.
    #[must_use]
    pub(crate) fn at_layer(&self, layer: usize) -> Self {
        Self { store: self.store.clone(), path: format!("model.layers.{layer}") }
    }

    /// Loads the projections `names` with their rows stacked, in the model's dtype, and their biases if
    /// `bias` is true.
    pub fn linear(&self, names: &[&str], bias: bool) -> Result<PackedLinear, ModelLoadError> {
        self.stacked(names, bias, &[1.0], None)
    }

    /// Loads the projections `q_proj`, `k_proj` and `v_proj` of a layer with the sizes of `config`, with their rows
    /// stacked, and their biases if the layer has them. If the key projection computes the values too, its rows are
    /// stacked twice; a layer that reads the keys and values of another layer has the rows of `q_proj` only.
    pub(crate) fn qkv_linear(&self, config: &ModelConfig) -> Result<PackedLinear, ModelLoadError> {
        let (bias, rotary_rows) = (config.qkv_bias, config.rotary_rows());
        let [query, key, _] = QKV_PROJECTIONS;
        match config.kv_projection {
            KvProjectionKind::Separate => self.stacked(&QKV_PROJECTIONS, bias, &[1.0], rotary_rows),
            KvProjectionKind::KeysAsValues => {
                self.stacked(&[query, key, key], bias, &[1.0], rotary_rows)
            }
            KvProjectionKind::Absent => self.stacked(&[query], bias, &[1.0], rotary_rows),
        }
    }

    /// Loads the projection `name` and multiplies its weights by `factors`, each of which belongs to an equally
    /// long range of input channels. The inputs of the layer are divided by these factors, and so is a static
    /// activation scale; if there are several factors, the activation scales are dynamic.
    pub fn linear_scaled(
        &self,
        name: &str,
        bias: bool,
        factors: &[f32],
    ) -> Result<PackedLinear, ModelLoadError> {
        self.stacked(&[name], bias, factors, None)
    }

    /// Loads the projections `names` with their rows stacked, and splits the result into `parts` layers with
    /// equally long ranges of input channels. The sum of the outputs of these layers is the output of the
    /// whole projection.
    pub fn linear_stacked(
        &self,
        names: &[&str],
        parts: usize,
    ) -> Result<Vec<PackedLinear>, ModelLoadError> {
        let take = |name: &&str| self.take(format_args!("{name}.weight"));
        let all = names.iter().map(take).collect::<Result<Vec<_>, _>>()?;
        let pack = |i: usize| -> Result<_, OpError> {
            let inputs =
                |part: &'_ HostWeightShard<'_>| part.matrix().map(|matrix| matrix.cols() / parts);
            let rows = all.iter().map(|part| {
                let inputs = inputs(part)?;
                Ok(part.matrix()?.column_range(i * inputs, inputs))
            });
            self.store.ops.pack_linear(&rows.collect::<Result<Vec<_>, OpError>>()?, None)
        };
        let packed = (0..parts).map(pack).collect::<Result<_, _>>();
        packed.map_err(|e| self.device(names.join("|"), e))
    }

    /// Whether the checkpoint contains the optional weight `name`. If not, the weight is marked as loaded, so
    /// that `finish` does not report it.
    pub fn has(&self, name: &str) -> bool {
        let has =
            self.store.untaken.borrow().get(name).is_some_and(|spec| self.store.source.has(spec));
        if !has {
            self.skip(name);
        }
        has
    }

    /// Loads the target token id of each draft token id, i32 `[1, draft vocabulary]`. The tensor `name`
    /// contains the offsets from draft token ids to target token ids. Returns `None` if the tensor is absent;
    /// in this case, every target token id equals its draft token id.
    pub fn draft_to_target(&self, name: &str) -> Result<Option<Tensor>, ModelLoadError> {
        if !self.has(name) {
            return Ok(None);
        }
        let store = &self.store;
        let spec = store.untaken.borrow_mut().remove(name);
        let unknown = ModelLoadError::table(name, "was read twice");
        let offsets = store.source.offsets(&spec.ok_or(unknown)?, store.config.vocab)?;
        let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        digest::add_common(store.observer.borrow_mut().digest, name, &bytes);
        let ids = offsets.iter().enumerate().map(|(draft, offset)| (draft as i64 + offset) as i32);
        let target_ids = store.ops.id_table(&ids.collect::<Vec<_>>());
        target_ids.map(Some).map_err(|e| self.device(name, e))
    }

    fn stacked(
        &self,
        names: &[&str],
        bias: bool,
        factors: &[f32],
        rotary_rows: Option<RotaryRowOrder>,
    ) -> Result<PackedLinear, ModelLoadError> {
        let [query, key, _] = QKV_PROJECTIONS;
        let order = |name: &str| rotary_rows.filter(|_| name == query || name == key);
        let mut parts = BTreeMap::new();
        let mut bias_parts = BTreeMap::new();
        for name in names {
            if parts.contains_key(name) {
                continue; // Its rows are stacked more than once.
            }
            parts.insert(name, self.take(format_args!("{name}.weight"))?.scaled(factors));
            if bias {
                let part = self.take(format_args!("{name}.bias"))?;
                let vector = part.vector().map_err(|e| self.device(name, e))?;
                let rows = order(name).map_or(vector.clone(), |rows| rows.of_vector(&vector));
                bias_parts.insert(name, rows);
            }
        }
        let biases: Vec<f32> =
            names.iter().filter_map(|name| bias_parts.get(name)).flatten().copied().collect();
        let pack = || -> Result<_, OpError> {
            let mut rows = Vec::new();
            for (name, part) in names.iter().map(|name| (name, &parts[name])) {
                let matrix = part.matrix()?;
                match order(name) {
                    Some(order) => rows.extend(order.of_matrix(&matrix)),
                    None => rows.push(matrix),
                }
            }
            // A bias of a row-parallel layer is only loaded on rank 0.
            let bias = (!biases.is_empty()).then_some(&biases[..]);
            self.store.ops.pack_linear(&rows, bias)
        };
        pack().map_err(|e| self.device(names.join("|"), e))
    }

    /// Loads the vector `name` in the model's dtype.
    pub fn vector(&self, name: &str) -> Result<Tensor, ModelLoadError> {
        self.vector_as(&[name], self.store.ops.dtype(), 0.0)
    }

    /// Loads the weight `name` of an RMS norm: in the model's dtype or, if the product with the weight is rounded
    /// once, in f32 ([`NormWeightKind::ZeroCentred`]: plus 1).
    pub(crate) fn norm_vector(&self, name: &str) -> Result<Tensor, ModelLoadError> {
        match self.store.config.norm_weights() {
            NormWeightKind::Standard => self.vector(name),
            NormWeightKind::ZeroCentred => self.vector_as(&[name], DType::F32, 1.0),
            NormWeightKind::Unrounded => self.vector_f32(name),
        }
    }

    /// Loads the weight `name` of an RMS norm, multiplied by `factor`, in f32.
    pub(crate) fn scaled_norm(&self, name: &str, factor: f32) -> Result<Tensor, ModelLoadError> {
        let values: Vec<f32> = self.host_vector(name)?.iter().map(|w| w * factor).collect();
        self.device_vector(name, &values)
    }

    /// Loads the vector `name` in f32, independent of the model's dtype.
    pub fn vector_f32(&self, name: &str) -> Result<Tensor, ModelLoadError> {
        self.vector_as(&[name], DType::F32, 0.0)
    }

    /// Loads the vectors `names`, concatenated into one vector, in the model's dtype.
    pub(crate) fn stacked_vector(&self, names: &[&str]) -> Result<Tensor, ModelLoadError> {
        self.vector_as(names, self.store.ops.dtype(), 0.0)
    }

    /// Loads this rank's part of the vector `name`, as f32 values in host memory.
    pub(crate) fn host_vector(&self, name: &str) -> Result<Vec<f32>, ModelLoadError> {
        self.take(name)?.vector().map_err(|e| self.device(name, e))
    }

    /// Loads the vectors `names`, concatenated, in `dtype`; `offset` is added to each element in f32.
    fn vector_as(
        &self,
        names: &[&str],
        dtype: DType,
        offset: f32,
    ) -> Result<Tensor, ModelLoadError> {
        let ops = self.store.ops;
        let parts = names.iter().map(|name| self.take(name)).collect::<Result<Vec<_>, _>>()?;
        let upload = || -> Result<_, OpError> {
            let mut values = Vec::new();
            for part in &parts {
                values.extend_from_slice(&part.vector()?);
            }
            let bytes: Vec<u8> = values.iter().flat_map(|v| (v + offset).to_le_bytes()).collect();
            let row = HostMat::new(&bytes, DType::F32, 1, values.len())?;
            ops.upload(&[row], dtype)?.reshape(&[values.len()])
        };
        upload().map_err(|e| self.device(names.join("|"), e))
    }

    /// Loads the matrix `name`, which must not be split over the ranks, as row-major f32 values in host
    /// memory.
    pub fn host_matrix(&self, name: &str) -> Result<Vec<f32>, ModelLoadError> {
        let part = self.take(name)?;
        let matrix = part.matrix().map_err(|e| self.device(name, e))?;
        let mut values = vec![0.0; matrix.rows() * matrix.cols()];
        for (r, row) in values.chunks_mut(matrix.cols()).enumerate() {
            matrix.read_row(r, row);
        }
        Ok(values)
    }

    /// Loads this rank's rows of the vocabulary matrix `name`, unpacked, for use as an embedding table.
    pub fn vocab_rows(&self, name: &str) -> Result<Tensor, ModelLoadError> {
        let (ops, part) = (self.store.ops, self.take(name)?);
        with_padding(&part, |rows| ops.upload(rows, ops.dtype())).map_err(|e| self.device(name, e))
    }

    /// Loads this rank's rows of the vocabulary matrix `name`, packed for use as an LM head.
    pub fn vocab_linear(&self, name: &str) -> Result<PackedLinear, ModelLoadError> {
        let (ops, part) = (self.store.ops, self.take(name)?);
        with_padding(&part, |rows| ops.pack_linear(rows, None)).map_err(|e| self.device(name, e))
    }

    /// Loads the up-projection of compressed KV (`kv_b_proj`) for the heads of this rank. For each head, it
    /// contains `keys` rows of W_UK, followed by `values` rows of W_UV.
    pub fn mla_heads(
        &self,
        name: &str,
        keys: usize,
        values: usize,
    ) -> Result<PackedMlaUpProjections, ModelLoadError> {
        let part = self.take(format_args!("{name}.weight"))?;
        let pack = || self.store.ops.pack_mla_heads(&part.matrix()?, keys, values);
        pack().map_err(|e| self.device(name, e))
    }

    /// Reads the scales that are stored under the first of `names` that exists; `None` if none exists. Returns
    /// one scale, or `heads` scales if they differ.
    ///
    /// Errors: a scale is not a finite number above 0, or the number of scales is neither 1 nor `heads`.
    pub fn head_scales(
        &self,
        names: &[&str],
        heads: usize,
    ) -> Result<Option<Vec<f32>>, ModelLoadError> {
        let names: Vec<String> = names.iter().map(|name| self.name(name)).collect();
        let scales = self.store.source.head_scales(&names, heads)?;
        if let (Some(scales), Some(name)) = (&scales, names.first()) {
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let observer = &mut *self.store.observer.borrow_mut();
            digest::add_common(observer.digest, name, &bytes);
        }
        Ok(scales)
    }

    /// Uploads `values` as an f32 vector; `name` is named if this fails.
    pub(crate) fn device_vector(
        &self,
        name: &str,
        values: &[f32],
    ) -> Result<Tensor, ModelLoadError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let upload = || -> Result<_, OpError> {
            let row = HostMat::new(&bytes, DType::F32, 1, values.len())?;
            self.store.ops.upload(&[row], DType::F32)?.reshape(&[values.len()])
        };
        upload().map_err(|e| self.device(name, e))
    }

    /// Factor of the scales of an FP8 KV cache (`KernelBackend::fp8_range_factor`).
    pub(crate) fn fp8_range_factor(&self) -> f32 {
        self.store.ops.device().fp8_range_factor()
    }

    /// Dtype of the KV cache.
    #[must_use]
    pub fn kv_dtype(&self) -> DType {
        self.store.kv_dtype
    }

    /// Returns the place of the keys and values of layer `layer`: a decoder layer, or an MTP module after the
    /// decoder layers.
    #[must_use]
    pub fn kv_layer(&self, layer: usize) -> KvLayerIndex {
        self.store.kv_grouping.layer(layer)
    }

    /// Number of positions in the RoPE tables: the longest context that requests can use, in tokens.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.store.positions
    }

    /// Indices of this rank on the tensor-parallel and expert-parallel axes.
    #[must_use]
    pub fn ranks(&self) -> &ParallelRanks {
        &self.store.ranks
    }

    /// Ops of the device on which the weights are stored.
    #[must_use]
    pub fn ops(&self) -> &Ops {
        self.store.ops
    }

    /// Creates an error for a failed device operation on the weight `child`.
    pub fn device(&self, child: impl Display, error: OpError) -> ModelLoadError {
        ModelLoadError::Device { tensor: self.name(child), error }
    }

    /// Creates an error for the weight `child`, which cannot be split evenly over the ranks.
    pub fn split(&self, child: impl Display, error: UnevenSplitError) -> ModelLoadError {
        ModelLoadError::Split { tensor: self.name(child), error }
    }

    fn take(&self, child: impl Display) -> Result<HostWeightShard<'_>, ModelLoadError> {
        self.store.take(&self.name(child))
    }

    /// Marks the weight `child` as loaded, so that `finish` does not report it. Used if only another rank
    /// loads the weight, or if the checkpoint omits it.
    fn skip(&self, child: impl Display) {
        self.store.untaken.borrow_mut().remove(&self.name(child));
    }

    fn name(&self, child: impl Display) -> String {
        if self.path.is_empty() { child.to_string() } else { format!("{}.{child}", self.path) }
    }
}

impl fmt::Debug for Weights<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Weights({})", self.path)
    }
}

/// Checks that every weight of a model can be split over `ranks`. Only the configuration is used, not the
/// checkpoint.
///
/// Errors: a weight cannot be split. The error contains the nearest number of tensor-parallel ranks over
/// which all weights can be split.
pub fn check_split(
    config: &ModelConfig,
    ranks: &ParallelRanks,
    placement: Option<&ExpertPlacement>,
) -> Result<(), ModelLoadError> {
    let specs = tensors(config);
    let first_error =
        |ranks: &ParallelRanks| specs.iter().find_map(|spec| split(spec, config, ranks).err());
    if let Some(placement) = placement {
        check_placement(placement, config, ranks.ep.size)?;
    } else if let Some(moe) = &config.moe {
        let split = |error| ModelLoadError::Split { tensor: "mlp.experts.*".to_owned(), error };
        ranks.experts(moe.experts).map_err(split)?;
    }
    let Some(error) = first_error(ranks) else { return Ok(()) };
    let ModelLoadError::Split { tensor, error } = error else { return Err(error) };
    let requested = ranks.tp.size;
    // `ranks.ep` is not changed: with expert parallelism, expert slices do not depend on the number of
    // tensor-parallel ranks.
    let with_size = |size| ParallelRanks { tp: ParallelRank { rank: 0, size }, ..*ranks };
    let sizes = (1..=config.heads)
        .filter(|&size| size != requested && first_error(&with_size(size)).is_none());
    let nearest = sizes.min_by_key(|size| size.abs_diff(requested)).unwrap_or(1);
    Err(ModelLoadError::Split { tensor, error: UnevenSplitError { nearest, ..error } })
}

/// Whether the weight `spec` belongs to an expert that is only on other ranks.
fn belongs_to_other_rank(
    spec: &TensorSpec,
    config: &ModelConfig,
    ranks: &ParallelRanks,
    placement: Option<&ExpertPlacement>,
) -> bool {
    let Some((moe, (layer, name))) = config.moe.as_ref().zip(spec.name.split_once(".experts."))
    else {
        return false;
    };
    let expert = name.split_once('.').and_then(|(expert, _)| expert.parse().ok());
    let layer = layer.split('.').find_map(|part| part.parse().ok());
    let Some((expert, layer)) = expert.zip(layer) else { return false };
    let own = local_experts(ranks, placement, layer, moe.experts);
    own.is_ok_and(|own| !own.experts.contains(&expert))
}

fn split(
    spec: &TensorSpec,
    config: &ModelConfig,
    ranks: &ParallelRanks,
) -> Result<WeightSlice, ModelLoadError> {
    let split_error = |error| ModelLoadError::Split { tensor: spec.name.clone(), error };
    let config = &*spec.layer.map_or(Cow::Borrowed(config), |layer| config.at_layer(layer));
    let slice = spec.shard.slice(spec.matrix(), config, ranks).map_err(split_error)?;
    // A row-parallel split must not divide the scale blocks of fp8 weights, because a kernel multiplies the partial
    // sum of a whole block by the block's scale. MXFP4 weights are dequantised when they are loaded.
    let Some(scales) = spec.quantized().filter(|scales| scales.format.is_fp8()) else {
        return Ok(slice);
    };
    let inputs = spec.matrix()[1];
    let [_, block] = scales.format.scales.block_shape(spec.matrix());
    if slice.cols.len() < inputs && block < inputs {
        if !inputs.is_multiple_of(block) {
            let (what, ranks) =
                ("inputs that are not a multiple of the scale block", ranks.tp.size);
            return Err(split_error(UnevenSplitError { what, count: inputs, ranks, nearest: 1 }));
        }
        ranks.tp.share("blocks of 128 inputs", inputs / block).map_err(split_error)?;
    }
    Ok(slice)
}

/// Calls `load` with this rank's rows of a vocabulary matrix, followed by its zero padding rows.
fn with_padding<T>(
    part: &HostWeightShard<'_>,
    load: impl FnOnce(&[HostMat<'_>]) -> Result<T, OpError>,
) -> Result<T, OpError> {
    let rows = part.matrix()?;
    let zeros = vec![0; part.padding() * rows.cols() * DType::F32.bytes()];
    let zeros = HostMat::new(&zeros, DType::F32, part.padding(), rows.cols())?;
    let stacked = [rows, zeros];
    load(if part.padding() == 0 { &stacked[..1] } else { &stacked })
}
