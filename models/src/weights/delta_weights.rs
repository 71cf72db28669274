//! Weights of gated delta net layers: input projections, whose stored row order depends on the model family, and the
//! causal convolution. Every rank reads whole tensors from the memory mapping and loads the rows of its key heads.

use super::Weights;
use super::source::HostWeightShard;
use crate::ModelLoadError;
use crate::config::GatedDeltaConfig;
use ops::{DType, HostMat, OpError, PackedLinear, Tensor};
use std::ops::Range;

/// Rows of one stored tensor, in the order in which they are loaded.
struct SelectedRows {
    tensor: &'static str,
    ranges: Vec<Range<usize>>,
}

impl Weights<'_> {
    /// Loads this rank's input projections of queries, keys, values and gates `z`, stacked in this order.
    pub(crate) fn delta_qkvz(
        &self,
        config: &GatedDeltaConfig,
        heads: &Range<usize>,
    ) -> Result<PackedLinear, ModelLoadError> {
        let (key, value) = (config.key_dim, config.heads_per_key() * config.value_dim);
        if config.grouped_rows {
            let ranges = grouped(heads, &[key, key, value, value]);
            return self.selected_rows(&[SelectedRows { tensor: "in_proj_qkvz", ranges }]);
        }
        let [q, k, v] = config.conv_ranges(heads);
        self.selected_rows(&[
            SelectedRows { tensor: "in_proj_qkv", ranges: vec![q, k, v] },
            SelectedRows { tensor: "in_proj_z", ranges: grouped(heads, &[value]) },
        ])
    }

    /// Loads this rank's input projections of the write strength and of the decay, stacked in this order.
    pub(crate) fn delta_gates(
        &self,
        config: &GatedDeltaConfig,
        heads: &Range<usize>,
    ) -> Result<PackedLinear, ModelLoadError> {
        let each = config.heads_per_key();
        if config.grouped_rows {
            let ranges = grouped(heads, &[each, each]);
            return self.selected_rows(&[SelectedRows { tensor: "in_proj_ba", ranges }]);
        }
        let rows = |tensor| SelectedRows { tensor, ranges: grouped(heads, &[each]) };
        self.selected_rows(&[rows("in_proj_b"), rows("in_proj_a")])
    }

    /// Loads this rank's channels of the convolution, f32 `[width, channels]`.
    pub(crate) fn conv_weight(
        &self,
        config: &GatedDeltaConfig,
        heads: &Range<usize>,
    ) -> Result<Tensor, ModelLoadError> {
        const NAME: &str = "conv1d.weight";
        let stored = self.host_vector(NAME)?; // [channels of all ranks, 1, width]
        let (width, ops) = (config.conv_width, self.ops());
        let channels = || config.conv_ranges(heads).into_iter().flatten();
        let values = (0..width).flat_map(|j| channels().map(move |c| c * width + j));
        let bytes: Vec<u8> = values.flat_map(|i| stored[i].to_le_bytes()).collect();
        let upload = || {
            let matrix = HostMat::new(&bytes, DType::F32, width, channels().count())?;
            ops.upload(&[matrix], DType::F32)
        };
        upload().map_err(|e| self.device(NAME, e))
    }

    fn selected_rows(&self, parts: &[SelectedRows]) -> Result<PackedLinear, ModelLoadError> {
        let take = |part: &SelectedRows| self.take(format_args!("{}.weight", part.tensor));
        let taken = parts.iter().map(take).collect::<Result<Vec<_>, _>>()?;
        let pack = || -> Result<_, OpError> {
            let mut rows = Vec::new();
            for (part, shard) in parts.iter().zip(&taken) {
                let matrix = HostWeightShard::matrix(shard)?;
                rows.extend(part.ranges.iter().map(|r| matrix.row_range(r.start, r.len())));
            }
            self.ops().pack_linear(&rows, None)
        };
        let names: Vec<&str> = parts.iter().map(|part| part.tensor).collect();
        pack().map_err(|e| self.device(names.join("|"), e))
    }

    /// Loads the query, key and value projections and the output gates of attention, stacked in this order. The stored
    /// query projection has the query of each head, then the gate of the head.
    pub(crate) fn gated_qkv_linear(&self, head_dim: usize) -> Result<PackedLinear, ModelLoadError> {
        let [q, k, v] = super::QKV_PROJECTIONS.map(|name| format!("{name}.weight"));
        let [q, k, v] = [self.take(q)?, self.take(k)?, self.take(v)?];
        let pack = || -> Result<_, OpError> {
            let queries = q.matrix()?;
            let heads = (0..queries.rows()).step_by(2 * head_dim);
            let mut rows: Vec<HostMat<'_>> =
                heads.clone().map(|head| queries.row_range(head, head_dim)).collect();
            rows.extend([k.matrix()?, v.matrix()?]);
            rows.extend(heads.map(|head| queries.row_range(head + head_dim, head_dim)));
            self.ops().pack_linear(&rows, None)
        };
        pack().map_err(|e| self.device("q_proj|k_proj|v_proj", e))
    }
}

/// Row ranges of a tensor whose rows are grouped by key head: first those of the first part of all heads `heads`, then
/// those of the second part, and so on. `parts` are the numbers of rows of each part of a head.
fn grouped(heads: &Range<usize>, parts: &[usize]) -> Vec<Range<usize>> {
    let group: usize = parts.iter().sum();
    let mut first = 0;
    let mut ranges = Vec::new();
    for part in parts {
        ranges.extend(heads.clone().map(|head| {
            let start = head * group + first;
            start..start + part
        }));
        first += part;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouped_rows_are_ordered_by_part() {
        assert_eq!(grouped(&(1..3), &[2, 4]), [6..8, 12..14, 8..12, 14..18]);
    }
}
