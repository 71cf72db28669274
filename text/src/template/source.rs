//! Finds the sources of a model's chat template in its folder, or in `--chat-template`.

use super::super::error::TextLoadError;
use super::super::tokenizer::{read_file, read_json};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Name of the template for conversations without tools.
pub(super) const DEFAULT_NAME: &str = "default";
/// Subfolder of a model folder with additional named templates.
const ADDITIONAL_FOLDER: &str = "additional_chat_templates";
/// Extension of template files.
const EXTENSION: &str = "jinja";
/// Maximum number of templates per model.
const TEMPLATES_MAX: usize = 64;

/// Source of a template, its name, and the file that it was read from.
pub(super) struct TemplateSource {
    pub(super) name: String,
    pub(super) text: String,
    pub(super) path: PathBuf,
}

impl TemplateSource {
    /// Reads the value of `--chat-template`: the file at this path if it exists, else the template itself.
    pub(super) fn chosen(chosen: &str) -> Result<Self, TextLoadError> {
        let path = Path::new(chosen);
        let literal = chosen.contains(['{', '}', '\n']);
        let text = match read_file(path) {
            Ok(Some(bytes)) => utf8(path, bytes)?,
            Err(error) if !literal => return Err(error),
            Ok(None) | Err(_) if literal => chosen.to_owned(),
            Ok(None) | Err(_) => return Err(TextLoadError::Missing(path.to_owned())),
        };
        Ok(Self { name: DEFAULT_NAME.to_owned(), text, path: path.to_owned() })
    }

    /// Reads the templates of a model folder.
    pub(super) fn of_model(dir: &Path) -> Result<Vec<Self>, TextLoadError> {
        let mut found = Self::additional(&dir.join(ADDITIONAL_FOLDER))?;
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read_file(&path)? {
            let text = utf8(&path, bytes)?;
            found.push(Self { name: DEFAULT_NAME.to_owned(), text, path });
        }
        if !found.is_empty() {
            return Ok(found);
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = dir.join(name);
            let Some(json) = read_json(&path)? else { continue };
            let found = Self::of_json(&json["chat_template"], &path)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Reads the templates in the folder of additional templates; the name of a template is its file name.
    fn additional(folder: &Path) -> Result<Vec<Self>, TextLoadError> {
        let unreadable = |source| TextLoadError::Read { path: folder.to_owned(), source };
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(unreadable(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(unreadable)?.path();
            let is_template = path.extension().is_some_and(|extension| extension == EXTENSION);
            let name = path.file_stem().and_then(|name| name.to_str()).filter(|_| is_template);
            let Some(name) = name.map(str::to_owned) else { continue };
            let Some(bytes) = read_file(&path)? else { continue };
            found.push(Self { name, text: utf8(&path, bytes)?, path });
        }
        if found.len() > TEMPLATES_MAX {
            let reason = format!("at most {TEMPLATES_MAX} templates, got {}", found.len());
            return Err(TextLoadError::Invalid { path: folder.to_owned(), reason });
        }
        Ok(found)
    }

    /// Reads the `chat_template` member of a JSON file: a string, or a list of `{"name", "template"}`.
    fn of_json(json: &Value, path: &Path) -> Result<Vec<Self>, TextLoadError> {
        let source = |name: &str, text: &str| Self {
            name: name.to_owned(),
            text: text.to_owned(),
            path: path.to_owned(),
        };
        let invalid = |reason: &str| TextLoadError::Invalid {
            path: path.to_owned(),
            reason: format!("chat_template: {reason}"),
        };
        match json {
            Value::Null => Ok(Vec::new()),
            Value::String(text) => Ok(vec![source(DEFAULT_NAME, text)]),
            Value::Array(list) => {
                let named = list.iter().map(|item| {
                    let name = item["name"].as_str();
                    let pair = name.zip(item["template"].as_str());
                    pair.map(|(name, text)| source(name, text))
                });
                let named: Option<Vec<Self>> = named.collect();
                let named = named.ok_or_else(|| invalid("an entry lacks name or template"))?;
                if named.len() > TEMPLATES_MAX {
                    return Err(invalid(&format!("more than {TEMPLATES_MAX} templates")));
                }
                Ok(named)
            }
            _ => Err(invalid("must be a string or a list")),
        }
    }
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, TextLoadError> {
    String::from_utf8(bytes).map_err(|_| TextLoadError::Invalid {
        path: path.to_owned(),
        reason: "not valid UTF-8".to_owned(),
    })
}
