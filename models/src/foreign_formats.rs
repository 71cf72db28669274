//! Formats of models that are not read: recognised by the names of the files, for error messages with a remedy.

/// Format of models that is not read.
struct ForeignFormat {
    /// Names of files by which the format is recognised; `*` matches any characters.
    files: &'static [&'static str],
    /// Text after the message that a file is missing.
    advice: &'static str,
}

/// Formats that are not read. If a folder has files of several formats, the first row decides.
const FORMATS: &[ForeignFormat] = &[
    ForeignFormat {
        files: &["*.gguf"],
        advice: "; GGUF is not supported: serve the original model, which has safetensors files",
    },
    ForeignFormat {
        files: &["adapter_config.json"],
        advice: "; adapters are not supported: merge the adapter into its base model with merge_and_unload() of peft",
    },
    ForeignFormat {
        files: &["model_index.json"],
        advice: "; pipelines of diffusers are not supported: only language models are served",
    },
    ForeignFormat {
        files: &["params.json", "consolidated*"],
        advice: "; the format of params.json and consolidated files is not supported: serve the model in the format of \
                 transformers, which has config.json and model.safetensors",
    },
    ForeignFormat {
        files: &[
            "*.onnx",
            "openvino_*.xml",
            "*.h5",
            "*.msgpack",
            "*.tflite",
            "*.engine",
            "*.nemo",
            "*.mlpackage",
        ],
        advice: "; models in the formats of ONNX, OpenVINO, TensorFlow, Flax, TensorRT, NeMo and Core ML are not \
                 supported: serve the original model, which has safetensors files",
    },
    ForeignFormat {
        files: &["*.bin", "*.pth", "*.pt", "*.ckpt"],
        advice: "; pickle files (.bin, .pth) can run code and are not read: convert them with \
                 save_pretrained(safe_serialization=True) of transformers",
    },
];

impl ForeignFormat {
    fn matches(&self, file: &str) -> bool {
        self.files.iter().any(|pattern| match pattern.split_once('*') {
            Some((start, end)) => file.starts_with(start) && file.ends_with(end),
            None => file == *pattern,
        })
    }
}

/// Returns which format that is not read the files of a model have, and the remedy, as the end of an error message about
/// a missing file; empty if no format is recognised.
pub fn format_hint<'a>(files: impl IntoIterator<Item = &'a str>) -> &'static str {
    let files: Vec<&str> = files.into_iter().collect();
    let found = FORMATS.iter().find(|format| files.iter().any(|file| format.matches(file)));
    found.map_or("", |format| format.advice)
}

/// Returns the hint of `format_hint` about the files of a folder.
pub(crate) fn folder_format_hint(dir: &std::path::Path) -> &'static str {
    let Ok(entries) = std::fs::read_dir(dir) else { return "; the folder cannot be listed" };
    let names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    format_hint(names.iter().map(String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognised_by_file_names() {
        for (files, word) in [
            (&["README.md", "m-Q4_K_M.gguf"][..], "GGUF"),
            (&["adapter_config.json", "adapter_model.safetensors"], "peft"),
            (&["model_index.json"], "diffusers"),
            (&["params.json", "consolidated.00.pth"], "params.json"),
            (&["consolidated.safetensors"], "params.json"),
            (&["model.onnx"], "ONNX"),
            (&["openvino_model.xml", "openvino_model.bin"], "OpenVINO"),
            (&["pytorch_model.bin"], "save_pretrained"),
            (&["tf_model.h5"], "TensorFlow"),
        ] {
            let hint = format_hint(files.iter().copied());
            assert!(hint.contains(word), "{files:?}: {hint}");
        }
        assert_eq!(format_hint(["config.json", "tokenizer.json", "model.safetensors"]), "");
    }
}
