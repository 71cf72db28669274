//! Parser of the RoPE settings: `rope_parameters` (new form), or `rope_theta` and `rope_scaling` (old form).
//!
//! The scaling type may be written as `type` or as `rope_type` in both forms. The following are rejected:
//! dynamic scaling; longrope scaling of architectures other than Phi-3; partial rotation of architectures other than
//! Phi-3 and those with gated delta net layers; unknown parameters; and two spellings of a parameter with different values. See `layer_rope` for settings by layer type.

use super::json_fields::JsonFields;
use super::layer_rope::{LOCAL_THETA, RopeSource, reject_unread_settings};
use super::temperature::{AttentionTemperatureConfig, BETA};
use super::{ModelArchitecture, ModelConfigError};

/// Settings of the rotary embedding (RoPE) of queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Base of the rotation frequencies (`rope_theta`).
    pub theta: f64,
    /// Scaling of the frequencies for contexts longer than the context of the original training.
    pub scaling: RopeScaling,
    /// Fraction of the channels of a head that RoPE rotates.
    pub partial_rotary_factor: f64,
}

/// Scaling of the rotation frequencies for longer contexts. A frequency `f` has the wavelength `2π/f`, in
/// positions.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// The rotation frequencies are not scaled.
    Default,
    /// Linear scaling: every frequency is divided by `factor`.
    Linear {
        /// Divisor of every rotation frequency.
        factor: f64,
    },
    /// Llama 3 scaling: frequencies with long wavelengths are divided by `factor`, frequencies with short
    /// wavelengths are unchanged, and frequencies with wavelengths in between are interpolated.
    Llama3 {
        /// Divisor of the frequencies with long wavelengths.
        factor: f64,
        /// Wavelengths above `original_positions / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_positions / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_positions: f64,
    },
    /// YaRN (arXiv 2309.00071): the frequencies of the first channels are unchanged, the frequencies of the
    /// last channels are divided by `factor`, and a linear ramp interpolates the frequencies in between;
    /// cosines and sines are multiplied by `attention_factor`.
    Yarn {
        /// Divisor of low rotation frequencies.
        factor: f64,
        /// Channels with more than this number of rotations over the original context are not scaled.
        beta_fast: f64,
        /// The frequencies of channels with fewer than this number of rotations over the original context are
        /// divided by `factor`.
        beta_slow: f64,
        /// Context length of the original training.
        original_positions: f64,
        /// Factor by which cosines and sines are multiplied.
        attention_factor: f64,
        /// Factor computed from the field `mscale_all_dim`; MLA multiplies its softmax scale by the square of
        /// this factor.
        all_dim_gain: f64,
        /// Whether the first and the last channel of the linear ramp are rounded to integer channel indices.
        truncate: bool,
    },
    /// LongRoPE (arXiv 2402.13753), as in transformers `modeling_rope_utils.py`: the frequency of each
    /// channel pair has a separate divisor; cosines and sines are multiplied by `attention_factor`.
    LongRope {
        /// Divisors of the frequencies if the longest context that is served does not exceed the original
        /// context.
        short_factors: Vec<f64>,
        /// Divisors of the frequencies if the longest context that is served exceeds the original context.
        /// The choice does not depend on the length of a request, so that cached keys can be shared between
        /// requests.
        long_factors: Vec<f64>,
        /// Context length of the original training.
        original_positions: f64,
        /// Factor by which cosines and sines are multiplied.
        attention_factor: f64,
    },
    /// Proportional RoPE (transformers `modeling_rope_utils.py`): the first pairs of channels have the frequencies of full
    /// rotation, divided by `factor`; the other pairs are not rotated. Pairs are half a head apart.
    Proportional {
        /// Divisor of every rotation frequency.
        factor: f64,
        /// Fraction of the pairs that are rotated (`partial_rotary_factor`).
        rotated: f64,
    },
}

/// Name of the object that contains the RoPE settings in the new form.
pub(super) const NEW_FORM: &str = "rope_parameters";
/// Name of the object that contains the RoPE settings in the old form.
pub(super) const OLD_FORM: &str = "rope_scaling";
/// Fields of `config.json` whose names begin with `rope_`.
const ROPE_FIELDS: &[&str] = &[NEW_FORM, OLD_FORM, "rope_theta", "rope_interleave"];
/// Fields of `rope_parameters` and `rope_scaling`.
const PARAMETERS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
];
/// Parameters of the RoPE of multimodal models (M-RoPE), in which a token has three positions. The three
/// positions of a text token are equal, so that these parameters have no effect on text.
const MROPE_PARAMETERS: &[&str] = &["mrope_section", "mrope_interleaved"];
/// Parameters of the attention temperature. transformers ignores `max_position_embeddings` in the RoPE
/// settings.
const TEMPERATURE_PARAMETERS: &[&str] = &[BETA, "max_position_embeddings"];
/// Parameters, in addition to the base, that some files store at the top level of `config.json`.
const TOP_LEVEL_PARAMETERS: &[&str] =
    &["original_max_position_embeddings", "partial_rotary_factor"];

impl RopeConfig {
    /// Reads the settings of the layers that attend to the whole context.
    pub(super) fn read(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        let is_known = |name: &str| {
            ROPE_FIELDS.contains(&name) || (name == LOCAL_THETA && architecture.is_gemma3())
        };
        let unknown = |name: &&str| name.starts_with("rope_") && !is_known(name);
        if let Some(name) = fields.names().find(unknown) {
            let why = format!("the known fields are {}", ROPE_FIELDS.join(", "));
            return Err(fields.unsupported(name, &why));
        }
        let source = RopeSource::full(fields, architecture)?;
        Self::read_from(fields, architecture, max_positions, source)
    }

    /// Reads the settings of the windowed layers.
    pub(super) fn read_windowed(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        let source = RopeSource::windowed(fields, architecture)?;
        Self::read_from(fields, architecture, max_positions, source)
    }

    fn read_from(
        fields: &JsonFields,
        architecture: ModelArchitecture,
        max_positions: usize,
        source: RopeSource,
    ) -> Result<Self, ModelConfigError> {
        let RopeSource { new, old, theta_field, default_theta } = source;
        let theta = fields.positive_or_none(theta_field)?;
        let partial = partial_rotary(fields, architecture)?;
        let default_partial = architecture.traits().partial_rotary_default.unwrap_or(1.0);
        if let (Some(new), Some(old)) = (&new, &old) {
            reject_different_forms(new, old)?;
        }
        let Some(map) = new.or(old) else {
            let theta = theta.unwrap_or(default_theta);
            let partial_rotary_factor = partial.unwrap_or(default_partial);
            return Ok(Self { theta, scaling: RopeScaling::Default, partial_rotary_factor });
        };
        for nested in ["full_attention", "sliding_attention"] {
            if map.value(nested).is_some() {
                return Err(map.unsupported(nested, "all layers must have equal RoPE parameters"));
            }
        }
        let has_mrope = architecture.is_multimodal() || architecture.traits().has_gated_delta;
        let mrope = if has_mrope { MROPE_PARAMETERS } else { &[] };
        let has_temperature = architecture.text_traits(fields).has_temperature;
        let temperature = if has_temperature { TEMPERATURE_PARAMETERS } else { &[] };
        map.reject_unknown(&[PARAMETERS, mrope, temperature].concat())?;
        if architecture.traits().has_rope_by_layer_type {
            reject_unread_settings(fields, &map)?;
        }
        map.reject_disagreement("rope_type", &map, "type")?;
        map.reject_disagreement("rope_theta", fields, theta_field)?;
        for parameter in TOP_LEVEL_PARAMETERS {
            map.reject_disagreement(parameter, fields, parameter)?;
        }
        let theta = map.positive_or_none("rope_theta")?.or(theta).unwrap_or(default_theta);
        if architecture.is_gemma4() && map.text("rope_type")? == Some("proportional") {
            let scaling = RopeScaling::proportional(&map)?;
            return Ok(Self { theta, scaling, partial_rotary_factor: 1.0 });
        }
        let original = match architecture {
            // transformers reads the original context length of Phi-3 only from the top level of
            // `config.json`.
            ModelArchitecture::Phi3 => phi3_original_positions(fields, &map)?,
            _ => original_positions(fields, &map, max_positions)?,
        };
        let scaling = match architecture {
            ModelArchitecture::Phi3 => RopeScaling::phi3(&map, original, max_positions)?,
            _ => RopeScaling::read(&map, original, max_positions)?,
        };
        let partial = partial_rotary(&map, architecture)?.or(partial);
        let partial_rotary_factor = partial.unwrap_or(default_partial);
        Ok(Self { theta, scaling, partial_rotary_factor })
    }

    /// Reads the attention temperature, whose parameters are in the RoPE settings.
    pub(super) fn temperature(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<Option<AttentionTemperatureConfig>, ModelConfigError> {
        let map = match fields.object(NEW_FORM)? {
            Some(map) => Some(map),
            None => fields.object(OLD_FORM)?,
        };
        AttentionTemperatureConfig::read(fields, architecture, map.as_ref())
    }

    /// Adds the RoPE settings of Ministral 3 or gpt-oss if `fields` has none (transformers
    /// `configuration_ministral3.py`, `configuration_gpt_oss.py`).
    pub(super) fn with_defaults(
        fields: &JsonFields,
        architecture: ModelArchitecture,
    ) -> Result<JsonFields, ModelConfigError> {
        // transformers ignores an empty object in the old form.
        let old = fields.object(OLD_FORM)?.filter(|map| map.names().next().is_some());
        let has_settings = fields.object(NEW_FORM)?.or(old).is_some();
        let settings = if has_settings {
            return Ok(fields.clone());
        } else if architecture == ModelArchitecture::GptOss {
            serde_json::json!({
                "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            })
        } else if architecture.text_traits(fields).has_temperature {
            serde_json::json!({
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
                "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
                "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
            })
        } else {
            return Ok(fields.clone());
        };
        let overrides = [(NEW_FORM.to_owned(), settings)].into_iter().collect();
        Ok(fields.clone().with(&overrides))
    }
}

impl RopeScaling {
    fn read(
        map: &JsonFields,
        original: f64,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        let (field, kind) = match map.text("rope_type")? {
            Some(kind) => ("rope_type", kind),
            None => ("type", map.text("type")?.unwrap_or("default")),
        };
        match kind {
            "default" => Ok(Self::Default),
            "linear" => Ok(Self::Linear { factor: map.positive("factor")? }),
            "llama3" => Self::llama3(map, original),
            "yarn" => Self::yarn(map, original, max_positions),
            _ => Err(map.unsupported(field, "supported are default, linear, llama3 and yarn")),
        }
    }

    /// Reads the scaling of Phi-3. Older configuration files of Phi-3 use the names `su` and `yarn` for
    /// longrope.
    fn phi3(
        map: &JsonFields,
        original: f64,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        let field = if map.value("rope_type").is_some() { "rope_type" } else { "type" };
        match map.text(field)? {
            None | Some("default") => Ok(Self::Default),
            Some("longrope" | "su" | "yarn") => Self::longrope(map, original, max_positions),
            Some(_) => Err(map.unsupported(field, "supported are default and longrope")),
        }
    }

    fn longrope(
        map: &JsonFields,
        original_positions: f64,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        if original_positions <= 1.0 {
            let detail = format!("{original_positions} must exceed 1");
            return Err(map.contradiction(ORIGINAL, detail));
        }
        let factor = map.positive_or_none("factor")?;
        let factor = factor.unwrap_or(max_positions as f64 / original_positions);
        let inferred =
            if factor > 1.0 { (1.0 + factor.ln() / original_positions.ln()).sqrt() } else { 1.0 };
        Ok(Self::LongRope {
            short_factors: map.positive_numbers("short_factor")?,
            long_factors: map.positive_numbers("long_factor")?,
            original_positions,
            attention_factor: map.positive_or_none("attention_factor")?.unwrap_or(inferred),
        })
    }

    fn proportional(map: &JsonFields) -> Result<Self, ModelConfigError> {
        const FIELD: &str = "partial_rotary_factor";
        let rotated = map.positive_or_none(FIELD)?.unwrap_or(1.0);
        if rotated > 1.0 {
            return Err(map.unsupported(FIELD, "it is at most 1.0"));
        }
        Ok(Self::Proportional { factor: map.positive_or_none("factor")?.unwrap_or(1.0), rotated })
    }

    fn llama3(map: &JsonFields, original_positions: f64) -> Result<Self, ModelConfigError> {
        let factor = map.positive("factor")?;
        let low_freq_factor = map.positive("low_freq_factor")?;
        let high_freq_factor = map.positive("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            let detail =
                format!("{high_freq_factor} must exceed low_freq_factor {low_freq_factor}");
            return Err(map.contradiction("high_freq_factor", detail));
        }
        Ok(Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions })
    }

    fn yarn(
        map: &JsonFields,
        original: f64,
        max_positions: usize,
    ) -> Result<Self, ModelConfigError> {
        let factor = map.positive_or_none("factor")?.unwrap_or(max_positions as f64 / original);
        let gain = |mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
        let mscales = (map.number_or_none("mscale")?, map.number_or_none("mscale_all_dim")?);
        let inferred = match mscales {
            (Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => gain(mscale) / gain(all),
            _ => gain(1.0),
        };
        Ok(Self::Yarn {
            factor,
            beta_fast: map.positive_or_none("beta_fast")?.unwrap_or(32.0),
            beta_slow: map.positive_or_none("beta_slow")?.unwrap_or(1.0),
            original_positions: original,
            all_dim_gain: mscales.1.filter(|all| *all != 0.0).map_or(1.0, gain),
            attention_factor: map.positive_or_none("attention_factor")?.unwrap_or(inferred),
            truncate: map.flag("truncate", true)?,
        })
    }
}

/// Rejects a configuration in which `rope_parameters` and `rope_scaling` are both present and a parameter
/// differs between them.
fn reject_different_forms(new: &JsonFields, old: &JsonFields) -> Result<(), ModelConfigError> {
    let kind = |form: &JsonFields| form.value("rope_type").or(form.value("type")).cloned();
    if kind(new).is_none() && kind(old).is_some_and(|kind| kind != "default") {
        let detail = format!("is missing, but the type of `{OLD_FORM}` is set");
        return Err(new.contradiction("rope_type", detail));
    }
    for (spelling, old_spelling) in [("rope_type", "type"), ("type", "rope_type")] {
        new.reject_disagreement(spelling, old, old_spelling)?;
    }
    for parameter in old.names().chain(new.names()) {
        let is_type = parameter == "type" || parameter == "rope_type";
        if !is_type && parameter != "rope_theta" && new.value(parameter).is_none() {
            let detail = format!("is missing, but `{OLD_FORM}.{parameter}` is set");
            return Err(new.contradiction(parameter, detail));
        }
        new.reject_disagreement(parameter, old, parameter)?;
    }
    Ok(())
}

/// Reads the fraction of the channels of a head that RoPE rotates.
fn partial_rotary(
    fields: &JsonFields,
    architecture: ModelArchitecture,
) -> Result<Option<f64>, ModelConfigError> {
    const FIELD: &str = "partial_rotary_factor";
    let may_be_partial = architecture.traits().partial_rotary_default.is_some();
    match fields.positive_or_none(FIELD)? {
        Some(factor) if factor > 1.0 => Err(fields.unsupported(FIELD, "it is at most 1.0")),
        Some(factor) if factor < 1.0 && !may_be_partial => {
            Err(fields.unsupported(FIELD, "only full rotation (1.0) is"))
        }
        factor => Ok(factor),
    }
}

/// Reads `original_max_position_embeddings` of Phi-3, with the default of transformers
/// `configuration_phi3.py`. A value that is only in the RoPE object has no effect in transformers, and is
/// therefore rejected unless it equals the default.
fn phi3_original_positions(fields: &JsonFields, map: &JsonFields) -> Result<f64, ModelConfigError> {
    const FIELD: &str = "original_max_position_embeddings";
    const DEFAULT: f64 = 4096.0;
    let positions = fields.positive_or_none(FIELD)?;
    match map.positive_or_none(FIELD)? {
        Some(nested) if positions.is_none() && nested.to_bits() != DEFAULT.to_bits() => {
            let detail = format!("{nested} must also be at the top level of config.json");
            Err(map.contradiction(FIELD, detail))
        }
        _ => Ok(positions.unwrap_or(DEFAULT)),
    }
}

/// Reads `original_max_position_embeddings` from the RoPE object or from the top level of `config.json`;
/// `RopeConfig::read` rejects files in which the two values differ.
fn original_positions(
    fields: &JsonFields,
    map: &JsonFields,
    max_positions: usize,
) -> Result<f64, ModelConfigError> {
    const FIELD: &str = "original_max_position_embeddings";
    let positions = match fields.positive_or_none(FIELD)? {
        Some(positions) => Some(positions),
        None => map.positive_or_none(FIELD)?,
    };
    Ok(positions.unwrap_or(max_positions as f64))
}
