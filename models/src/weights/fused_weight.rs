//! Fused tensors, in which checkpoints store several weights.
//!
//! `qkv_proj` stacks the rows of the query, key and value projections; `gate_up_proj` stacks the rows of the
//! gate and up projections. The experts of a layer may be stored in two tensors, `experts.gate_up_proj` and
//! `experts.down_proj`, with one matrix per expert. A checkpoint may store weights separately or fused.

use crate::config::{LayerQuantization, StackedRowKind, StoredExpertKind};
use crate::weight_table::TensorSpec;
use crate::{ModelArchitecture, ModelConfig};

/// Tensor that stacks the rows of several projections.
struct FusedProjection {
    name: &'static str,
    /// Names of the projections, in the order of their rows.
    projections: &'static [&'static str],
}

const QKV: FusedProjection =
    FusedProjection { name: "qkv_proj", projections: &["q_proj", "k_proj", "v_proj"] };
const GATE_UP: FusedProjection =
    FusedProjection { name: "gate_up_proj", projections: &["gate_proj", "up_proj"] };
/// Down projections of all experts, stored in one tensor; no rows are stacked.
const DOWN: FusedProjection = FusedProjection { name: "down_proj", projections: &["down_proj"] };

/// Location of a weight in a fused tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FusedWeightLocation {
    /// Canonical name of the fused tensor, which does not depend on the model family.
    pub(crate) name: String,
    /// Number of experts of the layer, each of which has one matrix in the fused tensor; `None` = the tensor
    /// is a single matrix.
    pub(crate) experts: Option<usize>,
    /// Index of the matrix that contains the weight.
    pub(crate) matrix: usize,
    /// Number of rows of each matrix.
    pub(crate) rows: usize,
    /// Number of projections whose rows each matrix stacks.
    pub(crate) projections: usize,
    /// First row of the weight in its matrix.
    pub(crate) first_row: usize,
    /// Distance between successive rows of the weight; above 1, the rows of the projections alternate.
    pub(crate) row_step: usize,
    /// Whether each matrix is stored transposed, as `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

impl FusedWeightLocation {
    /// Returns the location of the weight `spec` in a fused tensor; `None` if no checkpoint stores the weight
    /// fused.
    pub(crate) fn of(spec: &TensorSpec, config: &ModelConfig) -> Option<Self> {
        let (path, kind) = spec.name.rsplit_once('.')?;
        let (module, projection) = path.rsplit_once('.')?;
        let [rows, _] = spec.matrix();
        if let Some((layer, expert)) = module.split_once(".experts.") {
            let (fused, index) = find(&[GATE_UP, DOWN], projection)?;
            let projections = fused.projections.len();
            let alternates = config.architecture == ModelArchitecture::GptOss;
            let suffix = if kind == "bias" { "_bias" } else { "" };
            return Some(Self {
                name: format!("{layer}.experts.{}{suffix}", fused.name),
                experts: Some(config.moe.as_ref()?.experts),
                matrix: expert.parse().ok()?,
                rows: rows * projections,
                projections,
                first_row: if alternates { index } else { rows * index },
                row_step: if alternates { projections } else { 1 },
                transposed: stored_experts(config) == StoredExpertKind::Transposed,
            });
        }
        let (fused, index) = find(&[QKV, GATE_UP], projection)?;
        let counts = match fused.name {
            "qkv_proj" => {
                let [q, kv] = [config.heads, config.kv_heads].map(|heads| heads * config.head_dim);
                vec![q, kv, kv]
            }
            _ => vec![rows; 2],
        };
        Some(Self {
            name: format!("{module}.{}.{kind}", fused.name),
            experts: None,
            matrix: 0,
            rows: counts.iter().sum(),
            projections: counts.len(),
            first_row: counts[..index].iter().sum(),
            row_step: 1,
            transposed: false,
        })
    }

    /// Returns the location of the weight `spec` in the fused tensor of published checkpoints of its model
    /// family; `None` if these checkpoints store the weight separately.
    pub(crate) fn of_family(spec: &TensorSpec, config: &ModelConfig) -> Option<Self> {
        let fused = Self::of(spec, config)?;
        let is_stored = match fused.experts {
            Some(_) => stored_experts(config) != StoredExpertKind::Separate,
            None => stores_fused_rows(config, &fused),
        };
        is_stored.then_some(fused)
    }

    /// Specification of the fused tensor that contains the weight `spec`. It is used for the scales of the
    /// fused tensor.
    pub(crate) fn stored_spec(&self, spec: &TensorSpec) -> TensorSpec {
        TensorSpec { name: self.name.clone(), shape: self.shape(&spec.shape), ..spec.clone() }
    }

    /// Shape of the scales of the fused experts that contain a matrix of the shape `matrix`, in the format `format`:
    /// one grid of scales per expert. `None` if the fused tensor is one matrix.
    pub(crate) fn expert_scale_shape(
        &self,
        [_, inputs]: [usize; 2],
        format: LayerQuantization,
    ) -> Option<[usize; 3]> {
        let matrix = [self.rows, inputs];
        let block = format.scales.block_shape(matrix);
        let [rows, cols] = [0, 1].map(|i| matrix[i].div_ceil(block[i]));
        let grid = if self.transposed { [cols, rows] } else { [rows, cols] };
        self.experts.map(|experts| [experts, grid[0], grid[1]])
    }

    /// Shape of the fused tensor that contains a weight of the shape `shape`. Also applies to scales that
    /// have one row per output channel.
    pub(crate) fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut matrix = shape.to_vec();
        matrix[0] = self.rows;
        if self.transposed {
            matrix.reverse();
        }
        self.experts.into_iter().chain(matrix).collect()
    }
}

/// Tensors of the experts of a layer in published checkpoints.
fn stored_experts(config: &ModelConfig) -> StoredExpertKind {
    config.architecture.traits().stored_experts
}

/// Whether published checkpoints store the rows of projections stacked in the tensor `fused`.
fn stores_fused_rows(config: &ModelConfig, fused: &FusedWeightLocation) -> bool {
    match config.architecture.traits().stacked_rows {
        StackedRowKind::Absent => false,
        StackedRowKind::GateUp => fused.name.contains(GATE_UP.name),
        StackedRowKind::QkvAndGateUp => true,
    }
}

/// Returns the fused tensor that contains a projection, and the index of the projection in it.
fn find<'a>(
    candidates: &'a [FusedProjection],
    projection: &str,
) -> Option<(&'a FusedProjection, usize)> {
    candidates.iter().find_map(|fused| {
        let index = fused.projections.iter().position(|name| *name == projection)?;
        Some((fused, index))
    })
}
