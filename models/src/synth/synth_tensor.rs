//! Tensors of a synthetic checkpoint, with the encoding of their elements in the weight files.

use super::values::{SynthDistribution, SynthDraftVocab, SynthValueGenerator};
use super::write::{SynthDType, SynthOptions};
use crate::ModelConfig;
use crate::config::{ActivationScheme, CheckpointScaleGranularity, LayerQuantization};
use crate::weight_table::{TensorSpec, mtp_copies, tensors};
use half::{bf16, f16};
use std::io::{self, Write};

/// Tensor with one flag per target token id: whether it is the target of a draft token id. EAGLE-3
/// checkpoints store it in addition to the offsets `d2t`; Hadron does not load it.
const TARGET_TO_DRAFT: &str = "t2d";

/// Tensor of a synthetic checkpoint that is written to a weight file.
pub(super) struct SynthTensor {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    element: SynthElementType,
    generator: SynthValueGenerator,
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
    /// Flag per target token id: whether it is the target of a draft token id.
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
            generator,
        }
    });
    let copy = |(copy, of): (String, &str)| {
        let spec = specs.iter().find(|spec| spec.name == of)?;
        let weight = stored(spec, options, config.vocab).pop();
        weight.map(|weight| SynthTensor { name: copy, ..weight })
    };
    let copies = mtp_copies(config).into_iter().filter_map(copy);
    let weights = specs.iter().flat_map(|spec| stored(spec, options, config.vocab));
    weights.chain(copies).chain(flags).collect()
}

/// Tensors that are stored for a weight: the weight, and its scales if it is quantised.
fn stored(spec: &TensorSpec, options: &SynthOptions, vocab: usize) -> Vec<SynthTensor> {
    let [_, inputs] = spec.matrix();
    let tensor = |name: &str, shape, element, values| SynthTensor {
        generator: SynthValueGenerator::new(name, options.seed, values, inputs),
        name: name.to_owned(),
        shape,
        element,
    };
    if let Some(scales) = spec.quantized() {
        let LayerQuantization { scales: grid, activations, .. } = scales.format;
        let shape = match grid {
            CheckpointScaleGranularity::Tensor => Vec::new(),
            _ => spec.scale_shape(scales.format).to_vec(),
        };
        let [name, _] = spec.input_scale_names();
        let input = (activations == ActivationScheme::Static).then(|| {
            tensor(&name, Vec::new(), SynthElementType::F32, SynthDistribution::InputScale)
        });
        let name = spec.scale_names(scales.format).next().unwrap_or_default();
        let weight = tensor(&spec.name, spec.shape.clone(), SynthElementType::E4m3, spec.values);
        let scales = tensor(&name, shape, SynthElementType::F32, SynthDistribution::Scale);
        return [weight, scales].into_iter().chain(input).collect();
    }
    let element = match options.dtype {
        _ if spec.values == SynthDistribution::Offsets => {
            SynthElementType::Offsets(SynthDraftVocab {
                draft_ids: spec.elements(),
                target_ids: vocab,
            })
        }
        SynthDType::F32 => SynthElementType::F32,
        SynthDType::BF16 => SynthElementType::BF16,
        SynthDType::F16 => SynthElementType::F16,
    };
    vec![tensor(&spec.name, spec.shape.clone(), element, spec.values)]
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
        let values = &self.generator;
        for i in 0..self.elements() {
            match self.element {
                SynthElementType::F32 => to.write_all(&values.value(i).to_le_bytes())?,
                SynthElementType::BF16 => {
                    to.write_all(&bf16::from_f32(values.value(i)).to_le_bytes())?;
                }
                SynthElementType::F16 => {
                    to.write_all(&f16::from_f32(values.value(i)).to_le_bytes())?;
                }
                SynthElementType::E4m3 => to.write_all(&[values.e4m3(i)])?,
                SynthElementType::Offsets(draft_vocab) => {
                    to.write_all(&draft_vocab.offset(i).to_le_bytes())?;
                }
                SynthElementType::DraftableFlags(draft_vocab) => {
                    to.write_all(&[draft_vocab.contains(i).into()])?;
                }
            }
        }
        Ok(())
    }
}
