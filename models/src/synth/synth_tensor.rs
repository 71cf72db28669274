//! Tensors of a synthetic checkpoint, and the encoding of their elements in the weight files.

use super::values::{SynthDistribution, SynthDraftVocab, SynthValueGenerator};
use super::write::{SynthDType, SynthOptions};
use crate::ModelConfig;
use crate::config::{ActivationScheme, CheckpointScaleGranularity, LayerQuantization};
use crate::weight_table::{ScaleSpec, TensorSpec, mtp_copies, tensors};
use crate::weights::{FusedWeightLocation, family_name};
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
    /// Number of weights per matrix if the matrices of the tensor are written transposed; otherwise `None`.
    transposed_parts: Option<usize>,
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
            transposed_parts: None,
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
        SynthTensor { name, shape, element, parts, transposed_parts: None }
    };
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
            tensor.transposed_parts = fused.transposed.then_some(fused.projections);
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
                SynthElementType::E4m3 | SynthElementType::DraftableFlags(_) => 1,
            }
    }

    /// Name of the tensor's dtype in the safetensors header.
    pub(super) fn dtype(&self) -> &'static str {
        match self.element {
            SynthElementType::F32 => "F32",
            SynthElementType::BF16 => "BF16",
            SynthElementType::F16 => "F16",
            SynthElementType::E4m3 => "F8_E4M3",
            SynthElementType::Offsets(_) => "I64",
            SynthElementType::DraftableFlags(_) => "BOOL",
        }
    }

    /// Writes all elements of the tensor in row-major order, as encoded in the weight file.
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let Some(parts) = self.transposed_parts else {
            for part in &self.parts {
                let [rows, cols] = part.shape;
                for i in 0..(rows * cols) as u64 {
                    self.element.write(to, &part.generator, i)?;
                }
            }
            return Ok(());
        };
        for matrix in self.parts.chunks(parts) {
            let inputs = matrix[0].shape[1];
            for input in 0..inputs {
                for part in matrix {
                    for row in 0..part.shape[0] {
                        let i = (row * inputs + input) as u64;
                        self.element.write(to, &part.generator, i)?;
                    }
                }
            }
        }
        Ok(())
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
            Self::Offsets(draft_vocab) => to.write_all(&draft_vocab.offset(i).to_le_bytes()),
            Self::DraftableFlags(draft_vocab) => to.write_all(&[draft_vocab.contains(i).into()]),
        }
    }
}
