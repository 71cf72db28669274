//! Tensors of a synthetic checkpoint, and the encoding of their elements in the weight files.

use super::values::{SynthDistribution, SynthDraftVocab, SynthValueGenerator};
use super::write::{SynthDType, SynthOptions};
use crate::ModelConfig;
use crate::config::{ActivationScheme, CheckpointScaleGranularity, LayerQuantization, MXFP4_GROUP};
use crate::weight_table::{ScaleSpec, TensorSpec, mtp_copies, tensors};
use crate::weights::{BLOCKS, FusedWeightLocation, GROUP_BYTES, SCALES, family_name};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{self, Write};

/// Tensor with one flag per target token id: whether any draft token id maps to it. EAGLE-3 checkpoints store
/// this tensor in addition to the offsets `d2t`; Hadron does not load it.
const TARGET_TO_DRAFT: &str = "t2d";

/// Tensor of a synthetic checkpoint that is written to a weight file.
pub(super) struct SynthTensor {
    /// Name in the weight file.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    element: SynthElementType,
    /// Weights that the tensor contains, in row order.
    parts: Vec<SynthWeight>,
    order: SynthElementOrder,
}

/// Order in which the elements of a tensor are written.
#[derive(Clone, Copy)]
enum SynthElementOrder {
    /// Weight by weight, row by row.
    RowMajor,
    /// Each matrix transposed: input by input, and for each input the rows of all weights of the matrix.
    Transposed(StackedWeights),
    /// Row by row; the rows of the weights of a matrix alternate.
    Alternating(StackedWeights),
}

/// Weights that a matrix of a fused tensor stacks.
#[derive(Clone, Copy)]
struct StackedWeights {
    /// Number of weights per matrix.
    count: usize,
    /// Whether the rows of the weights alternate.
    alternate: bool,
}

/// Weight that a synthetic tensor contains.
#[derive(Clone, Copy)]
struct SynthWeight {
    generator: SynthValueGenerator,
    /// Number of rows and columns of the weight.
    shape: [usize; 2],
}

/// Type and encoding of the elements of a written tensor.
#[derive(Clone, Copy)]
enum SynthElementType {
    F32,
    BF16,
    F16,
    E4m3,
    /// MXFP4 elements, two per byte.
    E2m1,
    /// Scales of MXFP4 elements.
    E8m0,
    /// I64 offsets from draft token ids to target token ids (EAGLE-3).
    Offsets(SynthDraftVocab),
    /// Flag per target token id: whether any draft token id maps to it.
    DraftableFlags(SynthDraftVocab),
}

/// All tensors that a checkpoint stores, including the copies in MTP modules.
pub(super) fn all_tensors(config: &ModelConfig, options: &SynthOptions) -> Vec<SynthTensor> {
    let mut specs = tensors(config);
    specs.retain(|spec| !spec.optional);
    let flags = specs.iter().find(|spec| spec.values == SynthDistribution::Offsets).map(|spec| {
        let draft_vocab = SynthDraftVocab { draft_ids: spec.elements(), target_ids: config.vocab };
        let element = SynthElementType::DraftableFlags(draft_vocab);
        let generator =
            SynthValueGenerator::new(TARGET_TO_DRAFT, options.seed, SynthDistribution::Offsets, 1);
        SynthTensor {
            name: TARGET_TO_DRAFT.to_owned(),
            shape: vec![config.vocab],
            element,
            parts: vec![SynthWeight { generator, shape: [config.vocab, 1] }],
            order: SynthElementOrder::RowMajor,
        }
    });
    let copy = |(copy, of): (String, &str)| {
        let spec = specs.iter().find(|spec| spec.name == of)?;
        let weight = stored(spec, options, config).pop();
        weight.map(|weight| SynthTensor { name: copy, ..weight })
    };
    let copies = mtp_copies(config).into_iter().filter_map(copy);
    let weights = join_parts(specs.iter().flat_map(|spec| stored(spec, options, config)));
    let mut tensors: Vec<SynthTensor> = weights.into_iter().chain(copies).chain(flags).collect();
    for tensor in &mut tensors {
        tensor.name = family_name(config, &tensor.name);
    }
    tensors
}

/// Joins tensors of the same name, which are parts of one fused tensor.
fn join_parts(tensors: impl Iterator<Item = SynthTensor>) -> Vec<SynthTensor> {
    let mut joined: Vec<SynthTensor> = Vec::new();
    let mut indices = BTreeMap::new();
    for tensor in tensors {
        match indices.entry(tensor.name.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(joined.len());
                joined.push(tensor);
            }
            Entry::Occupied(entry) => joined[*entry.get()].parts.extend(tensor.parts),
        }
    }
    joined
}

/// Tensors that are stored for a weight: the weight, and its scales if it is quantised. If published
/// checkpoints of the model family store the weight in a fused tensor, the results are parts of fused
/// tensors.
fn stored(spec: &TensorSpec, options: &SynthOptions, config: &ModelConfig) -> Vec<SynthTensor> {
    let [_, inputs] = spec.matrix();
    let tensor = |name: &str, shape: Vec<usize>, element, values| {
        let generator = SynthValueGenerator::new(name, options.seed, values, inputs);
        let rows = shape.first().copied().unwrap_or(1);
        let part = SynthWeight { generator, shape: [rows, shape.iter().product::<usize>() / rows] };
        let (name, parts) = (name.to_owned(), vec![part]);
        SynthTensor { name, shape, element, parts, order: SynthElementOrder::RowMajor }
    };
    if let Some(tensors) = mxfp4_tensors(spec, options.seed, config) {
        return tensors;
    }
    let mut tensors = if let Some(scales) = spec.quantized() {
        quantized_tensors(spec, scales, tensor)
    } else {
        let element = plain_element(spec, options, config.vocab);
        vec![tensor(&spec.name, spec.shape.clone(), element, spec.values)]
    };
    // A quantised weight is fused only if it has one scale per output channel and no static activation scale.
    // Otherwise the parts of a fused tensor would share scales, and these scales differ from the scales of
    // separately stored weights.
    let is_fusible =
        |fused: &FusedWeightLocation| match spec.quantized().map(|scales| scales.format) {
            None => true,
            Some(format) => {
                fused.experts.is_none()
                    && format.scales == CheckpointScaleGranularity::Channels
                    && format.activations != ActivationScheme::Static
            }
        };
    if let Some(fused) = FusedWeightLocation::of_family(spec, config).filter(is_fusible) {
        for tensor in &mut tensors {
            tensor.name = tensor.name.replacen(&spec.name, &fused.name, 1);
            tensor.shape = fused.shape(&tensor.shape);
            if fused.transposed {
                tensor.order = SynthElementOrder::Transposed(StackedWeights::of(&fused));
            }
        }
    }
    tensors
}

/// Tensors that are stored for a quantised weight: the weight, its scales and, if activation scales are
/// static, the activation scale. `tensor` creates a tensor from name, shape, element type and distribution.
fn quantized_tensors(
    spec: &TensorSpec,
    scales: &ScaleSpec,
    tensor: impl Fn(&str, Vec<usize>, SynthElementType, SynthDistribution) -> SynthTensor,
) -> Vec<SynthTensor> {
    let LayerQuantization { scales: grid, activations, .. } = scales.format;
    let shape = match grid {
        CheckpointScaleGranularity::Tensor => Vec::new(),
        _ => spec.scale_shape(scales.format).to_vec(),
    };
    let [name, _] = spec.input_scale_names();
    let input = (activations == ActivationScheme::Static)
        .then(|| tensor(&name, Vec::new(), SynthElementType::F32, SynthDistribution::InputScale));
    let name = spec.scale_names(scales.format).next().unwrap_or_default();
    let weight = tensor(&spec.name, spec.shape.clone(), SynthElementType::E4m3, spec.values);
    let scales = tensor(&name, shape, SynthElementType::F32, SynthDistribution::Scale);
    [weight, scales].into_iter().chain(input).collect()
}

/// Tensors that are stored for a weight in MXFP4, as parts of fused tensors: elements and scales. `None` for other
/// weights.
fn mxfp4_tensors(spec: &TensorSpec, seed: u64, config: &ModelConfig) -> Option<Vec<SynthTensor>> {
    spec.quantized_mxfp4()?;
    let fused = FusedWeightLocation::of(spec, config)?;
    let [elements, scales] = mxfp4_generators(spec, seed);
    let [rows, inputs] = spec.matrix();
    let groups = inputs.div_ceil(MXFP4_GROUP);
    let grid = vec![fused.experts?, fused.rows, groups];
    let blocks = [grid.clone(), vec![GROUP_BYTES]].concat();
    let tensor = |suffix, shape, element, generator, cols| SynthTensor {
        name: format!("{}{suffix}", fused.name),
        shape,
        element,
        parts: vec![SynthWeight { generator, shape: [rows, cols] }],
        order: SynthElementOrder::Alternating(StackedWeights::of(&fused)),
    };
    Some(vec![
        tensor(BLOCKS, blocks, SynthElementType::E2m1, elements, groups * GROUP_BYTES),
        tensor(SCALES, grid, SynthElementType::E8m0, scales, groups),
    ])
}

/// Generators of the elements and of the scales of a weight in MXFP4.
pub(crate) fn mxfp4_generators(spec: &TensorSpec, seed: u64) -> [SynthValueGenerator; 2] {
    let [_, inputs] = spec.matrix();
    let scales = format!("{}_scale", spec.name);
    [(&spec.name, spec.values), (&scales, SynthDistribution::GroupScale)]
        .map(|(name, values)| SynthValueGenerator::new(name, seed, values, inputs))
}

impl StackedWeights {
    const fn of(fused: &FusedWeightLocation) -> Self {
        Self { count: fused.projections, alternate: fused.row_step > 1 }
    }
}

/// Element type of a weight that is not quantised.
fn plain_element(spec: &TensorSpec, options: &SynthOptions, vocab: usize) -> SynthElementType {
    match options.dtype {
        _ if spec.values == SynthDistribution::Offsets => {
            SynthElementType::Offsets(SynthDraftVocab {
                draft_ids: spec.elements(),
                target_ids: vocab,
            })
        }
        SynthDType::F32 => SynthElementType::F32,
        SynthDType::BF16 => SynthElementType::BF16,
        SynthDType::F16 => SynthElementType::F16,
    }
}

impl SynthTensor {
    fn elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    /// Number of bytes of the tensor in the weight file.
    pub(super) fn bytes(&self) -> u64 {
        self.elements()
            * match self.element {
                SynthElementType::Offsets(_) => 8,
                SynthElementType::F32 => 4,
                SynthElementType::BF16 | SynthElementType::F16 => 2,
                SynthElementType::E4m3
                | SynthElementType::E2m1
                | SynthElementType::E8m0
                | SynthElementType::DraftableFlags(_) => 1,
            }
    }

    /// Name of the tensor's dtype in the safetensors header.
    pub(super) fn dtype(&self) -> &'static str {
        match self.element {
            SynthElementType::F32 => "F32",
            SynthElementType::BF16 => "BF16",
            SynthElementType::F16 => "F16",
            SynthElementType::E4m3 => "F8_E4M3",
            SynthElementType::E2m1 | SynthElementType::E8m0 => "U8",
            SynthElementType::Offsets(_) => "I64",
            SynthElementType::DraftableFlags(_) => "BOOL",
        }
    }

    /// Writes all elements of the tensor, as encoded in the weight file.
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self.order {
            SynthElementOrder::RowMajor => {
                let all = StackedWeights { count: 1, alternate: false };
                self.parts.chunks(1).try_for_each(|matrix| self.write_rows(to, matrix, all))
            }
            SynthElementOrder::Alternating(stacked) => {
                let mut matrices = self.parts.chunks(stacked.count);
                matrices.try_for_each(|matrix| self.write_rows(to, matrix, stacked))
            }
            SynthElementOrder::Transposed(stacked) => {
                let mut matrices = self.parts.chunks(stacked.count);
                matrices.try_for_each(|matrix| self.write_transposed(to, matrix, stacked))
            }
        }
    }

    fn write_rows(
        &self,
        to: &mut impl Write,
        matrix: &[SynthWeight],
        stacked: StackedWeights,
    ) -> io::Result<()> {
        for StackedRow { part, row } in stacked.rows(matrix) {
            let cols = part.shape[1];
            for i in row * cols..(row + 1) * cols {
                self.element.write(to, &part.generator, i as u64)?;
            }
        }
        Ok(())
    }

    fn write_transposed(
        &self,
        to: &mut impl Write,
        matrix: &[SynthWeight],
        stacked: StackedWeights,
    ) -> io::Result<()> {
        let inputs = matrix.first().map_or(0, |part| part.shape[1]);
        for input in 0..inputs {
            for StackedRow { part, row } in stacked.rows(matrix) {
                self.element.write(to, &part.generator, (row * inputs + input) as u64)?;
            }
        }
        Ok(())
    }
}

/// Row of a matrix of a fused tensor.
struct StackedRow<'a> {
    /// Weight to which the row belongs.
    part: &'a SynthWeight,
    /// Index of the row in the weight.
    row: usize,
}

impl StackedWeights {
    /// Rows of the weights in `matrix`, in the order in which the matrix stacks them.
    fn rows(self, matrix: &[SynthWeight]) -> impl Iterator<Item = StackedRow<'_>> {
        let each = matrix.first().map_or(0, |part| part.shape[0]);
        let count = matrix.len();
        (0..each * count).map(move |i| {
            let (part, row) =
                if self.alternate { (i % count, i / count) } else { (i / each, i % each) };
            StackedRow { part: &matrix[part], row }
        })
    }
}

impl SynthElementType {
    /// Writes the element with the index `i` of the weight that `values` generates.
    fn write(self, to: &mut impl Write, values: &SynthValueGenerator, i: u64) -> io::Result<()> {
        match self {
            Self::F32 => to.write_all(&values.value(i).to_le_bytes()),
            Self::BF16 => to.write_all(&bf16::from_f32(values.value(i)).to_le_bytes()),
            Self::F16 => to.write_all(&f16::from_f32(values.value(i)).to_le_bytes()),
            Self::E4m3 => to.write_all(&[values.e4m3(i)]),
            Self::E2m1 => to.write_all(&[values.e2m1(2 * i) | values.e2m1(2 * i + 1) << 4]),
            Self::E8m0 => to.write_all(&[values.e8m0(i)]),
            Self::Offsets(draft_vocab) => to.write_all(&draft_vocab.offset(i).to_le_bytes()),
            Self::DraftableFlags(draft_vocab) => to.write_all(&[draft_vocab.contains(i).into()]),
        }
    }
}
